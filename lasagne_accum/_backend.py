"""The one place that knows which Theano the variables belong to.

Nothing is imported before the first variable is seen, so that
``import lasagne_accum`` costs nothing and needs no Theano.
"""

import functools
import gc
from collections import OrderedDict

import numpy as np


class Theano:
    """What the package needs of Theano 1.0."""

    def __init__(self):
        import theano
        import theano.ifelse
        import theano.sandbox.rng_mrg

        self.tensor = theano.tensor
        self.shared = theano.shared
        self.function = theano.function
        self.clone = theano.clone
        self.random_streams = theano.sandbox.rng_mrg.MRG_RandomStreams
        self._theano = theano

    def grad(self, loss, params):
        """Differentiate; name a parameter that the loss does not use."""
        gradient = self._theano.gradient
        try:
            return gradient.grad(loss, params)
        except gradient.DisconnectedInputError as error:
            grads = gradient.grad(
                loss,
                params,
                disconnected_inputs="ignore",
                return_disconnected="None",
            )
            unused = params[grads.index(None)]
            raise gradient.DisconnectedInputError(
                "`params` must have a part in the loss, got "
                f"{unused.name or unused}, which has none. Leave it out."
            ) from error

    def ifelse(self, condition, kept, applied):
        """Compute one of two lists, under linkers that can."""
        condition = _lazy_condition(self._theano)(condition)
        return self._theano.ifelse.ifelse(condition, kept, applied)

    def is_shared(self, variable):
        """Say whether a variable is a shared one."""
        return isinstance(variable, self._theano.compile.SharedVariable)

    def is_symbolic(self, value):
        """Say whether a value is a variable of a graph."""
        return isinstance(value, self._theano.Variable)

    def zeros(self, dtype, name=None, like=None):
        """Make a shared scalar 0, or zeros of the shape of a shared `like`."""
        if like is None:
            return self.shared(np.zeros((), dtype), name)
        return self.shared(
            np.zeros(self.shape(like), dtype),
            name,
            broadcastable=like.broadcastable,
            target=like.type.context_name,
        )

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
        shape = [int(axis) for axis in variable.broadcastable]
        return self.shared(
            np.zeros(shape, variable.dtype),
            variable.name and f"{variable.name}_carried",
            broadcastable=variable.broadcastable,
        )

    def used(self, givens, expressions):
        """Take those substitutions that expressions have a use for."""
        graph = set(self._theano.gof.graph.ancestors(expressions))
        return OrderedDict(
            pair
            for pair in OrderedDict(givens or ()).items()
            if pair[0] in graph
        )

    def apart(self, grad, total, calls):
        """Keep Theano from adding a product by GEMM where that is slow.

        On a GPU and where a BLAS is linked, there is no faster way. What
        Theano does without one takes several times as long as a product and
        a sum.
        """
        if self._theano.config.blas.ldflags or _is_on_gpu(total):
            return grad
        # Always true, but Theano doesn't know.
        return self.tensor.switch(self.tensor.ge(calls, 0), grad, 0)

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
        inputs = self._theano.gof.graph.inputs(expressions)
        return [v for v in inputs if hasattr(v, "default_update")]

    def free(self, function):
        """Drop the intermediate values that a failed call has left behind."""
        storage_map = getattr(function.fn, "storage_map", {})
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
        graph = self._theano.gof.graph
        return [
            v
            for v in graph.inputs(expressions)
            if not isinstance(v, graph.Constant) and not self.is_shared(v)
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
    return variable.type.context_name != "cpu"


@functools.lru_cache(maxsize=None)
def _lazy_condition(theano):
    """Make an identity that tells who can't run an `ifelse` what to do."""

    class LazyCondition(theano.Op):
        __props__ = ()

        def make_node(self, condition):
            return theano.Apply(self, [condition], [condition.type()])

        def perform(self, node, inputs, output_storage):
            output_storage[0][0] = inputs[0].copy()

        def c_code(self, *args):
            raise NotImplementedError(
                '`gate` must be "switch" under the linker c, got "lazy". Take '
                "another linker (cvm, vm, c|py, py), or that gate."
            )

    return LazyCondition()
