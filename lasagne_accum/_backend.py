"""The one place that knows which Theano the variables belong to.

That is Theano, Theano-PyMC, Aesara or PyTensor. Nothing is imported before
the first variable is seen, so that ``import lasagne_accum`` costs nothing.
"""

import contextlib
import functools
import gc
import importlib
import sys
from collections import OrderedDict

import numpy as np
from numpy.random import Generator

NAMES = ("theano", "aesara", "pytensor")


def of(*values):
    """Find what the variables in values, or lists of them, belong to."""
    owned = OrderedDict()
    _find_owners(values, owned)
    if len(owned) > 1:
        said = " and ".join(f"{owned[name]} of {name}" for name in owned)
        raise TypeError(
            "`params` and all that goes with them must be of one backend, got "
            f"{said}. Build the whole graph with one of them."
        )
    imported = [name for name in NAMES if name in sys.modules]
    return Backend(next(iter([*owned, *imported, *NAMES])))


def _find_owners(values, owned):
    for value in values:
        if isinstance(value, dict):
            _find_owners([*value, *value.values()], owned)
        if isinstance(value, (list, tuple)):
            _find_owners(value, owned)
        for ancestor in type(value).__mro__:
            name = ancestor.__module__.partition(".")[0]
            if name in NAMES:
                owned.setdefault(name, value)


def as_update(variable, update):
    """Make an update of its variable's type, as far as functions would."""
    # Types that state shapes are refined for it, others must be the same.
    states_shape = isinstance(getattr(variable.type, "shape", None), tuple)
    return variable.type.filter_variable(update, allow_convert=states_shape)


class Backend:
    """What the package needs of one of them, by the name of its module."""

    def __init__(self, name):
        self._name, self._root = name, importlib.import_module(name)

        # Where each of them has it, the newest first.
        graph = self._first("graph.traversal", "graph.basic", "gof.graph")
        self._basic = self._first("graph.basic", "gof.graph")
        self._ifelse = self._first("conditional", "ifelse").ifelse
        self._ancestors = graph.ancestors
        self._inputs = getattr(graph, "graph_inputs", None) or graph.inputs
        clones = self._first("graph.replace", "graph.basic", "gof.graph")
        self.clone = getattr(self._root, "clone", None) or clones.clone_replace
        self.tensor = self._first("tensor")
        self.shared, self.function = self._root.shared, self._root.function

    def _first(self, *modules):
        """Import the first of these that there is."""
        for module in modules[:-1]:
            with contextlib.suppress(ImportError):
                return importlib.import_module(f"{self._name}.{module}")
        return importlib.import_module(f"{self._name}.{modules[-1]}")

    def random_streams(self, seed):
        """Make random streams for every device that Theano runs on."""
        return self._first("sandbox.rng_mrg").MRG_RandomStreams(seed)

    def grad(self, loss, params):
        """Differentiate; name a parameter that the loss does not use."""
        disconnected = self._root.gradient.DisconnectedInputError
        try:
            return self._root.grad(loss, params)
        except disconnected as error:
            unused = next(p for p in params if not self._is_used(loss, p))
            raise disconnected(
                "`params` must have a part in the loss, got "
                f"{unused.name or unused}, which has none. Leave it out."
            ) from error

    def _is_used(self, loss, param):
        try:
            self._root.grad(loss, param)
        except self._root.gradient.DisconnectedInputError:
            return False
        return True

    def ifelse(self, condition, kept, applied):
        """Compute one of two lists, under linkers that can."""
        if self._name == "theano":
            op = getattr(self._root, "Op", None) or self._first("graph.op").COp
            condition = _lazy_condition(op, self._basic.Apply)(condition)
        return self._ifelse(condition, kept, applied)

    def is_shared(self, variable):
        """Say whether a variable is a shared one."""
        return isinstance(variable, self._root.compile.SharedVariable)

    def is_symbolic(self, value):
        """Say whether a value is a variable of a graph."""
        return isinstance(value, self._basic.Variable)

    def zeros(self, dtype, name=None, like=None):
        """Make a shared scalar 0, or zeros of the shape of a shared `like`."""
        if like is None:
            return self.shared(np.zeros((), dtype), name)
        place = {"target": like.type.context_name} if _is_on_gpu(like) else {}
        return self.shared(
            np.zeros(self.shape(like), dtype),
            name,
            **self._pattern(like),
            **place,
        )

    def _pattern(self, variable):
        """Give what `shared` takes to make a variable of the same shape."""
        shape = getattr(variable.type, "shape", None)
        if isinstance(shape, tuple):
            return {"shape": shape}
        return {"broadcastable": variable.broadcastable}

    def shape(self, variable):
        """Read the shape of a shared variable's value, where it is."""
        return variable.get_value(borrow=True, return_internal_type=True).shape

    def dense(self, value):
        """Make a tensor variable of an array or of a sparse variable."""
        if hasattr(value, "toarray"):
            return value.toarray()
        return self.tensor.as_tensor_variable(value)

    def empty_like(self, variable):
        """Make a shared variable for the values of a function input."""
        pattern = self._pattern(variable)
        [lengths] = pattern.values()
        return self.shared(
            np.zeros([int(length or 0) for length in lengths], variable.dtype),
            variable.name and f"{variable.name}_carried",
            **pattern,
        )

    def used(self, givens, expressions):
        """Take those substitutions that expressions have a use for."""
        graph = set(self._ancestors(expressions))
        return OrderedDict(
            pair
            for pair in OrderedDict(givens or ()).items()
            if pair[0] in graph
        )

    def apart(self, grad, total, calls):
        """Keep C code from adding a product by GEMM where that is slow.

        On a GPU and where a BLAS is linked, there is no faster way. What
        Theano does without one takes several times as long as a product and
        a sum.
        """
        if _is_on_gpu(total) or self._links_blas_or_needs_none():
            return grad
        # Always true, but Theano doesn't know.
        return self.tensor.switch(self.tensor.ge(calls, 0), grad, 0)

    def _links_blas_or_needs_none(self):
        config = self._root.config
        if self._name == "pytensor":
            linker = self._root.compile.mode.get_default_mode().linker
            # PyTensor would search for a BLAS that Numba and JAX don't link.
            if hasattr(linker, "jit_compile"):
                return True
        if hasattr(config, "blas__ldflags"):
            return config.blas__ldflags
        return config.blas.ldflags

    def is_finite(self, grad, total):
        """Say whether all of a gradient is finite, where its total is."""
        T = self.tensor
        finite = T.lt(abs(grad), np.inf)
        if _is_on_gpu(total):
            # The only reduction that Theano has on every device.
            return T.eq(T.switch(finite, 0, 1).astype("float32").sum(), 0)
        return T.all(finite)

    def self_updating(self, expressions):
        """List random streams and averages that move by being used."""
        return [
            v
            for v in self._inputs(expressions)
            if getattr(v, "default_update", None) is not None
            # PyMC moves its streams when it compiles.
            or (self.is_shared(v) and isinstance(v.container.data, Generator))
        ]

    def free(self, function):
        """Drop the intermediate values that a failed call has left behind."""
        run = getattr(function, "fn", None) or function.vm
        storage_map = getattr(run, "storage_map", {})
        for variable, storage in storage_map.items():
            if variable.owner is not None:
                storage[0] = None
        # Theano's errors hold on to arrays, and are held by their traceback.
        gc.collect()

    def is_out_of_memory(self, error):
        """Say whether an error means that the host or device is full."""
        # Theano adds hints, some of them on memory, below the first line.
        first_line = str(error).partition("\n")[0].lower()
        return isinstance(error, MemoryError) or (
            type(error).__name__ == "GpuArrayException"
            and any(said in first_line for said in _FULL)
        )

    def missing_inputs(self, expressions):
        """List what a graph needs besides shared variables and constants."""
        return [
            v
            for v in self._inputs(expressions)
            if not isinstance(v, self._basic.Constant)
            and not self.is_shared(v)
        ]


# What pygpu says when memory has run out, on CUDA and OpenCL devices.
_FULL = (
    "alloc",
    "clcreatebuffer",
    "out of memory",
    "out of host memory",
    "out of resources",
)


def _is_on_gpu(variable):
    return getattr(variable.type, "context_name", "cpu") != "cpu"


@functools.lru_cache(maxsize=None)
def _lazy_condition(op, apply):
    """Make an identity that tells who can't run an `ifelse` what to do."""

    class LazyCondition(op):
        __props__ = ()

        def make_node(self, condition):
            return apply(self, [condition], [condition.type()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = inputs[0].copy()

        def c_code(self, *args):
            raise NotImplementedError(
                '`gate` must be "switch" under the linker c, got "lazy". Take '
                "another linker (cvm, vm, c|py, py), or that gate."
            )

    return LazyCondition()
