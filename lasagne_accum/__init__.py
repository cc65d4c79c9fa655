"""Gradient accumulation for Theano and Lasagne.

Any update rule sees the mean gradient of `N` minibatches, so that a batch
that doesn't fit into memory trains as if it did.

.. autosummary::
    :nosignatures:

    with_accumulated_gradients
    accumulated
    accumulate_gradients
    AccumulatedUpdates
    function
    AccumulatedFunction
    updates

Import it before Theano and Lasagne: it lets Theano 1.0.5 import beside
newer versions of numpy, and Lasagne 0.1 on Theano 1.0.

Examples
--------
>>> import lasagne_accum
>>> import lasagne, theano
>>> w, x = theano.shared(0.0, name="w"), theano.tensor.dvector("x")
>>> loss = ((w - x) ** 2).mean()
>>> updates = lasagne_accum.with_accumulated_gradients(
...     loss, [w], 10, lasagne.updates.sgd, learning_rate=0.5
... )
>>> train = theano.function([x], loss, updates=updates)
>>> losses = [float(train([i, i + 1])) for i in range(10)]
>>> float(w.get_value())  # the mean of all 20 numbers
5.0
"""

import importlib

from . import _compat  # noqa: F401
from .accumulation import (
    AccumulatedUpdates,
    accumulate_gradients,
    accumulated,
    with_accumulated_gradients,
)
from .function import AccumulatedFunction, function

__all__ = [
    "with_accumulated_gradients",
    "accumulated",
    "accumulate_gradients",
    "AccumulatedUpdates",
    "function",
    "AccumulatedFunction",
    "updates",
]
__version__ = "0.1.0"


def __getattr__(name):
    # Imported when it is asked for, since it imports Lasagne.
    if name == "updates":
        return importlib.import_module(__name__ + ".updates")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
