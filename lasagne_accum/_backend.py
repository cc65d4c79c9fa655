"""The one place that knows which Theano the variables belong to.

Nothing is imported before the first variable is seen, so that
``import lasagne_accum`` costs nothing and needs no Theano.
"""

import numpy as np


class Theano:
    """What the package needs of Theano 1.0."""

    def __init__(self):
        import theano
        import theano.ifelse
        import theano.sandbox.rng_mrg

        self.tensor = theano.tensor
        self.shared = theano.shared
        self.grad = theano.grad
        self.function = theano.function
        self.ifelse = theano.ifelse.ifelse
        self.clone = theano.clone
        self.random_streams = theano.sandbox.rng_mrg.MRG_RandomStreams
        self._theano = theano

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
        value = np.zeros(self.shape(like), dtype)
        return self.shared(value, name, broadcastable=like.broadcastable)

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

    def self_updating(self, expressions):
        """List random streams and averages that move by being used."""
        inputs = self._theano.gof.graph.inputs(expressions)
        return [v for v in inputs if hasattr(v, "default_update")]

    def is_out_of_memory(self, error):
        """Say whether an error means that the host or device is full."""
        return isinstance(error, MemoryError) or (
            type(error).__name__ == "GpuArrayException"
            and "memory" in str(error)
        )

    def missing_inputs(self, expressions):
        """List what a graph needs besides shared variables and constants."""
        graph = self._theano.gof.graph
        return [
            v
            for v in graph.inputs(expressions)
            if not isinstance(v, graph.Constant) and not self.is_shared(v)
        ]
