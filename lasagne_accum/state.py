"""Read and restore the values of shared variables by name."""

import json
from collections import Counter, OrderedDict

import numpy as np

__all__ = ["Saved", "read", "restore"]


# A legacy stream of numpy, less the name of its algorithm, which has been the
# same in all of them; a generator as JSON, the longest of which takes 7,400.
_STREAM = np.dtype(
    [("key", "u4", 624), ("pos", "i8"), ("has_gauss", "i8"), ("gauss", "f8")]
)
_GENERATOR = np.dtype("S8192")


class Saved:
    """What has a state: the values of its ``_state_variables()``."""

    _any_shape, _window = (), None

    def get_state(self):
        """Read all that training goes on from.

        Returns
        -------
        OrderedDict
            Copies of the values of all variables that training changes, the
            parameters and the window included, and of the random streams it
            uses: a unique name for each, and a numpy array.
            ``numpy.savez(path, **state)`` takes it.
        """
        return read(self._state_variables())

    def set_state(self, values):
        """Go on from a state, bit for bit.

        Parameters
        ----------
        values : dict
            What :meth:`get_state` returned, or what ``numpy.load`` makes of
            its file.

        Raises
        ------
        ValueError
            If a name is missing or unknown, a value's shape or dtype is not
            that of its variable, or the window would hold fewer than no
            calls or weight. Nothing is changed then.
        """
        totals = self._window.held[1:] if self._window else ()
        restore(self._state_variables(), values, self._any_shape, totals)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "`pickle` and `copy.deepcopy` must be given plain values, got an "
            f"{type(self).__name__}. Give them what `get_state` returns, and "
            "that to `set_state` of one made anew."
        )


def read(variables):
    """Copy the values of shared variables.

    Parameters
    ----------
    variables : list of shared variables
        The variables to read.

    Returns
    -------
    OrderedDict
        A numpy array for each variable, under a name of its own: that of the
        variable, with an index where several have the same, in the order of
        `variables`.
    """
    return OrderedDict(
        (name, _array(variable.get_value()))
        for name, variable in _named(variables).items()
    )


def restore(variables, values, any_shape=(), from_zero=()):
    """Set shared variables to values that were read from them.

    Parameters
    ----------
    variables : list of shared variables
        The variables, in the order in which they were read.
    values : dict
        A numpy array for each of their names.
    any_shape : collection of shared variables, optional
        Those of `variables` whose values may differ in shape from the ones
        that they have. Defaults to none.
    from_zero : collection of shared variables, optional
        Those of `variables` whose values must not be negative. Defaults to
        none.

    Raises
    ------
    ValueError
        If a name is missing or unknown, a value's shape or dtype is not that
        of its variable, or it is negative where it must not be. Nothing is
        changed then.
    """
    named = _named(variables)
    for name in sorted(set(named) ^ set(values)):
        raise ValueError(
            "`values` must have the names that `get_state` gives here, got "
            f"{'no' if name in named else 'the unknown'} {name!r}. Restore "
            "into the same network, rule and options."
        )
    for name, variable in named.items():
        old = _array(variable.get_value(borrow=True))
        new = np.asarray(values[name])
        shape = old.shape
        if variable in any_shape and new.ndim == old.ndim:
            fixed = variable.broadcastable
            shape = tuple(np.where(fixed, shape, new.shape))
        fits = shape == new.shape
        if not fits or old.dtype != new.dtype:
            raise ValueError(
                "`values` must have the shapes and dtypes that `get_state` "
                f"gives here, got {new.dtype}{new.shape} for {name!r} of "
                f"{old.dtype}{old.shape}. Restore into the same network, rule "
                "and options."
            )
        # The weight is NaN after a bad one, rightly.
        if variable in from_zero and new < 0:
            raise ValueError(
                "`values` must have counts and weights from 0 up, got "
                f"{new} for {name!r}. Restore what `get_state` gave."
            )

    for name, variable in named.items():
        value = np.array(values[name])
        if value.dtype == _STREAM:
            stream = np.random.RandomState()
            stream.set_state(("MT19937", *value.item()))
            value = stream
        elif value.dtype == _GENERATOR:
            state = json.loads(value.item())
            algorithm = getattr(np.random, state["bit_generator"])()
            algorithm.state = state
            value = np.random.Generator(algorithm)
        variable.set_value(value, borrow=True)


def _array(value):
    if isinstance(value, np.random.Generator):
        # The arrays of an algorithm become lists, which it takes as well.
        text = json.dumps(value.bit_generator.state, default=np.ndarray.tolist)
        return np.array(text, _GENERATOR)
    if isinstance(value, np.random.RandomState):
        return np.array(tuple(value.get_state()[1:]), _STREAM)
    return np.asarray(value)


def _named(variables):
    """Give each variable a name of its own, stable from run to run."""
    names = [variable.name or "unnamed" for variable in variables]
    # The first argument of numpy.savez is called file.
    total, seen = Counter([*names, "unnamed", "file"]), Counter()
    named = OrderedDict()
    for name, variable in zip(names, variables):
        unique = name
        while total[name] > 1 and (unique in total or unique in named):
            unique = f"{name}_{seen[name]}"
            seen[name] += 1
        named[unique] = variable
    return named
