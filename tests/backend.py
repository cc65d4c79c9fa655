"""What the tests run on: Theano and Lasagne's rules, or PyMC's and theirs."""

import functools
import importlib
import inspect
import os
import warnings

import lasagne_accum

import pytest

# The module of the rules: that of Lasagne, of pymc3 or of pymc.
MODULE = os.environ.get("RULES", "lasagne.updates")
NAME = "pytensor" if MODULE.startswith("pymc.") else "theano"

rules = importlib.import_module(MODULE)
theano = importlib.import_module(NAME)
T = importlib.import_module(f"{NAME}.tensor")
sparse = importlib.import_module(f"{NAME}.sparse")

if NAME == "theano":
    from theano.sandbox.rng_mrg import MRG_RandomStreams as Streams
    from theano.tensor.shared_randomstreams import (
        RandomStreams as NumpyStreams,
    )
else:

    class Streams:
        """Random streams that are called like Theano's."""

        def __init__(self, seed):
            self._stream = T.random.shared_rng(seed=seed)
            self.state_updates = []

        def binomial(self, size, p, dtype):
            return self._drawn("binomial", 1, p, size=size).astype(dtype)

        def normal(self, size, dtype):
            return self._drawn("normal", size=size).astype(dtype)

        def updates(self):
            return self.state_updates

        def _drawn(self, distribution, *args, **kw):
            moved, drawn = getattr(self._stream, distribution)(*args, **kw)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._stream.default_update = moved
            self.state_updates.append((self._stream, moved))
            return drawn

    NumpyStreams = Streams

with_lasagne = MODULE.startswith("lasagne")
lasagne_only = pytest.mark.skipif(not with_lasagne, reason="needs Lasagne")
theano_only = pytest.mark.skipif(
    NAME != "theano", reason="uses or quotes what Theano alone has"
)


def broadcast(*pattern):
    """Say to `shared` along which axes a variable is broadcast."""
    if NAME == "theano":
        return {"broadcastable": pattern}
    return {"shape": tuple(1 if axis else None for axis in pattern)}


def is_rule(name):
    parameters = inspect.signature(getattr(rules, name)).parameters
    return next(iter(parameters)) == "loss_or_grads"


RULES = {name: getattr(rules, name) for name in rules.__all__ if is_rule(name)}
# Not one of Lasagne's, and not in the reference.
RULES.pop("adagrad_window", None)
if with_lasagne:
    for name in ("adamax", "amsgrad"):  # which Lasagne 0.1 lacks
        ours = getattr(lasagne_accum.updates, name)
        RULES.setdefault(name, functools.partial(ours, average=1))
