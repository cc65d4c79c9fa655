"""What the tests run on: Theano and Lasagne's rules, or PyMC's and theirs."""

import contextlib
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # What comes with PyMC3 has plenty.
    rules = importlib.import_module(MODULE)
theano = importlib.import_module(NAME)
T = importlib.import_module(f"{NAME}.tensor")
sparse = importlib.import_module(f"{NAME}.sparse")


class Adapter:
    """Numpy's streams of a later backend, called like those of Theano 1.0."""

    def __init__(self, seed):
        self.state_updates = []
        if NAME == "theano":
            self._streams = T.random.utils.RandomStream(seed)
        else:
            self._streams = T.random.shared_rng(seed=seed)

    def binomial(self, size, p, dtype):
        return self._drawn("binomial", 1, p, size=size).astype(dtype)

    def normal(self, size, dtype):
        return self._drawn("normal", size=size).astype(dtype)

    def updates(self):
        return self.state_updates

    def _drawn(self, distribution, *args, **kw):
        drawn = getattr(self._streams, distribution)(*args, **kw)
        if NAME == "theano":
            self.state_updates = self._streams.updates()
            return drawn
        moved, drawn = drawn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._streams.default_update = moved
        self.state_updates.append((self._streams, moved))
        return drawn


def renamed(module, *names):
    """Find what has another name in one backend or version than in others."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"{NAME}.{module}")
        return next(getattr(module, n) for n in names if hasattr(module, n))
    return Adapter


Streams = renamed("sandbox.rng_mrg", "MRG_RandomStreams", "MRG_RandomStream")
NumpyStreams = renamed("tensor.shared_randomstreams", "RandomStreams")
with_lasagne = MODULE.startswith("lasagne")
lasagne_only = pytest.mark.skipif(not with_lasagne, reason="needs Lasagne")
theano_only = pytest.mark.skipif(
    NAME != "theano", reason="uses or quotes what Theano alone has"
)
# Its `ifelse` takes none, and it quotes them otherwise.
not_theano_pymc = pytest.mark.skipif(
    NAME == "theano" and NumpyStreams is Adapter,
    reason="Theano-PyMC can't branch between random streams",
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
