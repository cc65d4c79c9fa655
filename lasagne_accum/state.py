"""Read and restore the values of shared variables by name."""

from collections import Counter, OrderedDict

import numpy as np

__all__ = ["read", "restore"]


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
        (name, np.array(variable.get_value()))
        for name, variable in _named(variables).items()
    )


def restore(variables, values):
    """Set shared variables to values that were read from them.

    Parameters
    ----------
    variables : list of shared variables
        The variables, in the order in which they were read.
    values : dict
        A numpy array for each of their names.

    Raises
    ------
    ValueError
        If a name is missing or unknown, or a value's shape or dtype is not
        that of its variable. Nothing is changed then.
    """
    named = _named(variables)
    for name in sorted(set(named) ^ set(values)):
        raise ValueError(
            "`values` must have the names that `get_state` gives here, got "
            f"{'no' if name in named else 'the unknown'} {name!r}. Restore "
            "into the same network, rule and options."
        )
    for name, variable in named.items():
        old, new = variable.get_value(borrow=True), np.asarray(values[name])
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                "`values` must have the shapes and dtypes that `get_state` "
                f"gives here, got {new.dtype}{new.shape} for {name!r} of "
                f"{old.dtype}{old.shape}. Restore into the same network, rule "
                "and options."
            )

    for name, variable in named.items():
        variable.set_value(np.array(values[name]), borrow=True)


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
