"""Collect gradients over a window of calls, hand their mean to a rule.

.. autosummary::
    :nosignatures:

    with_accumulated_gradients
    accumulated
    accumulate_gradients
    AccumulatedUpdates

All of them share one definition of the window: :func:`_open_window` says
what one call adds to it, :func:`_mean_grads` what its mean is.
"""

import functools
import numbers
from collections import OrderedDict, namedtuple

import numpy as np

from . import _backend, state

__all__ = [
    "with_accumulated_gradients",
    "accumulated",
    "accumulate_gradients",
    "AccumulatedUpdates",
]


def with_accumulated_gradients(
    loss_or_grads,
    params,
    N,
    update_fn,
    *,
    weight=None,
    gate="switch",
    skip_nonfinite=False,
    accumulator_dtype=None,
    statistics=(),
    **kw,
):
    """Let an update rule see the mean gradient of every `N` calls.

    On each call:

    * ``accumulator := accumulator + gradient``
    * ``counter := counter + 1``

    and on the calls that make ``counter`` reach `N`, after that:

    * ``updates of update_fn(accumulator / counter, params, **kw)``
    * ``accumulator := 0``
    * ``counter := 0``

    Parameters
    ----------
    loss_or_grads : symbolic expression or list of expressions
        A scalar loss expression, or a list of gradient expressions, one for
        each parameter and of its shape.
    params : list of shared variables
        The variables to update, none of them twice.
    N : int or symbolic integer scalar
        The number of calls in a window, from 1 up. A shared variable or
        another symbolic scalar may change its value at any time: the window
        ends with the first call that finds `N` or more calls collected.
    update_fn : function
        An update rule like those in ``lasagne.updates``: a function
        ``(loss_or_grads, params, **kw)`` that returns updates.
    weight : float or symbolic scalar, optional
        The weight of a call, such as its number of samples or of unmasked
        tokens: the rule sees ``sum(weight * gradient) / sum(weight)``.
        A call of weight zero contributes nothing, whatever its gradient,
        but counts; a window of total weight zero changes nothing. A call
        whose weight turns out negative, infinite or NaN, or out of what the
        dtype of an accumulator holds, itself or in the window's sum, counts
        as one whose gradients are all NaN. Defaults to equal weights.
    gate : {"switch", "lazy"}, optional
        How the rule's updates are held back between boundaries. "switch"
        computes them and discards them with ``T.switch``, in every mode of
        Theano. "lazy" computes them at the boundary only, with ``ifelse``;
        it needs one of Theano's lazy linkers (the default is one), and is
        the slow one under PyTensor's numba. Both give the same bits.
        Defaults to "switch".
    skip_nonfinite : bool, optional
        Whether to treat a call of positive weight with an infinity or a NaN
        in any gradient as if it had never come. Defaults to False.
    accumulator_dtype : str, optional
        The floating-point dtype of the accumulators. Defaults to the dtype
        of the parameter, float32 for float16.
    statistics : list of layers, optional
        Lasagne layers, such as all of a network, whose running averages (of
        batch normalization) move once for each window, by the mean of what
        its calls would make of them. A second ``get_output`` among the
        outputs of ``theano.function``, unless deterministic, still moves
        them. Defaults to none: they move on each call.
    **kw
        Passed on to `update_fn`.

    Returns
    -------
    AccumulatedUpdates
        A dictionary mapping each variable to its update expression, for
        ``theano.function(..., updates=updates)``.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind, or the rule returns an update
        of another type than its variable's.
    ValueError
        If an argument has an impossible value.

    See Also
    --------
    accumulated : The same as an update rule.
    lasagne_accum.function : The fastest form, called like a function.

    Notes
    -----
    After `N` calls, every variable is where one call of
    ``update_fn(loss, params, **kw)`` on all the samples of those calls would
    have left it, up to the rounding of the sum, if the loss is a mean over
    equally many samples in each call (or `weight` is their number) and each
    sample's loss is independent of the others. That excludes batch
    normalization, whose statistics are those of the call, contrastive
    losses, and penalties that depend on the batch; penalties on the
    parameters alone are counted once per update, as they should be.

    Everything that the rule returns is held back: momenta and step counters
    keep their bits between boundaries. What it does not return, such as the
    random stream of dropout, moves on every call.

    A call that raises, between boundaries, leaves the parameters and the
    state of the rule as they were, but may have been half collected: call
    ``reset`` before the next one. :func:`lasagne_accum.function` does it.

    Rounding: the mean of 4,096 float32 gradients is off by about 1e-6 of
    itself, by up to 6e-5 if all are equal. With ``accumulator_dtype=
    "float64"``, as large as a compensated sum, its last place is right.

    Memory: one accumulator for each parameter, and one scalar counter of
    the smallest signed integer type that holds `N`. The lazy gate holds the
    new values twice while it applies them. With ``N=1`` and neither
    `weight` nor `skip_nonfinite`, the rule's own updates are returned, and
    no variable is made.

    Examples
    --------
    >>> import lasagne_accum
    >>> import lasagne, theano
    >>> w, x = theano.shared(0.0, name="w"), theano.tensor.dscalar("x")
    >>> updates = lasagne_accum.with_accumulated_gradients(
    ...     (w - x) ** 2, [w], 2, lasagne.updates.sgd, learning_rate=0.5
    ... )
    >>> train = theano.function([x], updates.updated, updates=updates)
    >>> bool(train(1.0)), float(w.get_value())
    (False, 0.0)
    >>> bool(train(3.0)), float(w.get_value())
    (True, 2.0)
    """
    backend, params = _checked_params(params, loss_or_grads, N, weight, kw)
    N = _checked_N(backend, N)
    _check_gate(gate)

    if N == 1 and weight is None and not skip_nonfinite:
        rule = _checked_updates(update_fn, loss_or_grads, params, **kw)
        return AccumulatedUpdates(backend, None, rule)

    window = _open_window(
        backend,
        loss_or_grads,
        params,
        N=N,
        weight=weight,
        skip_nonfinite=skip_nonfinite,
        accumulator_dtype=accumulator_dtype,
        statistics=statistics,
    )
    means = _means(window, window.collected)
    rule = _applied(window, means, update_fn, **kw)
    return AccumulatedUpdates(backend, window, rule, means, N, gate)


def accumulated(
    update_fn,
    N,
    *,
    weight=None,
    gate="switch",
    skip_nonfinite=False,
    accumulator_dtype=None,
    statistics=(),
):
    """Make an update rule that sees the mean gradient of every `N` calls.

    Parameters
    ----------
    update_fn : function
        An update rule like those in ``lasagne.updates``, or PyMC's.
    N : int or symbolic integer scalar
        The number of calls in a window, from 1 up.
    weight : float or symbolic scalar, optional
        The weight of a call. Defaults to equal weights.
    gate : {"switch", "lazy"}, optional
        How the updates are held back. Defaults to "switch".
    skip_nonfinite : bool, optional
        Whether to skip calls with infinite or NaN gradients. Defaults to
        False.
    accumulator_dtype : str, optional
        The floating-point dtype of the accumulators. Defaults to the dtype
        of the parameter, float32 for float16.
    statistics : list of layers, optional
        The layers whose running averages move once for each window.
        Defaults to none.

    Returns
    -------
    function
        An update rule: called as `update_fn` would be, it returns
        :class:`AccumulatedUpdates`. Called like PyMC's rules, without a loss
        and parameters, it returns a rule that waits for them.

    See Also
    --------
    with_accumulated_gradients : The same in one call, with all the details.

    Examples
    --------
    >>> import lasagne_accum
    >>> import lasagne, theano
    >>> w = theano.shared(4.0, name="w")
    >>> sgd2 = lasagne_accum.accumulated(lasagne.updates.sgd, 2)
    >>> updates = sgd2(w**2, [w], learning_rate=0.25)
    >>> train = theano.function([], updates=updates)
    >>> [train() and None or float(w.get_value()) for call in range(4)]
    [4.0, 2.0, 2.0, 1.0]
    """

    def updates(loss_or_grads, params, *args, **kw):  # numpydoc ignore=GL08
        return with_accumulated_gradients(
            loss_or_grads,
            params,
            N,
            lambda grads, params: update_fn(grads, params, *args, **kw),
            weight=weight,
            gate=gate,
            skip_nonfinite=skip_nonfinite,
            accumulator_dtype=accumulator_dtype,
            statistics=statistics,
        )

    @functools.wraps(update_fn)
    def rule(*args, **kw):  # numpydoc ignore=GL08
        if args or "loss_or_grads" in kw or "params" in kw:
            return updates(*args, **kw)
        return functools.partial(rule, **kw)

    return rule


def accumulate_gradients(
    loss_or_grads,
    params,
    *,
    weight=None,
    skip_nonfinite=False,
    accumulator_dtype=None,
    statistics=(),
):
    """Collect gradients with one function, to apply their mean with another.

    `accumulate` holds, on each of its calls:

    * ``accumulator := accumulator + gradient``
    * ``counter := counter + 1``

    `mean_grads` is ``accumulator / counter``, zeros when nothing is
    collected, and `reset`, to be added to the updates that use it, holds:

    * ``accumulator := 0``
    * ``counter := 0``

    Parameters
    ----------
    loss_or_grads : symbolic expression or list of expressions
        A scalar loss expression, or a list of gradient expressions, one for
        each parameter and of its shape.
    params : list of shared variables
        The variables to update, none of them twice.
    weight : float or symbolic scalar, optional
        The weight of a call: the mean is ``sum(weight * gradient) /
        sum(weight)``. Defaults to equal weights.
    skip_nonfinite : bool, optional
        Whether to skip calls with infinite or NaN gradients. Defaults to
        False.
    accumulator_dtype : str, optional
        The floating-point dtype of the accumulators. Defaults to the dtype
        of the parameter, float32 for float16.
    statistics : list of layers, optional
        The layers whose running averages `accumulate` leaves alone, and
        `reset` moves by the mean of the window. Defaults to none.

    Returns
    -------
    accumulate : OrderedDict
        The updates to make on each call.
    mean_grads : list of expressions
        The mean gradients, of the parameters' shapes and dtypes, to hand to
        an update rule.
    reset : OrderedDict
        The updates that empty the window.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If an argument has an impossible value.

    See Also
    --------
    with_accumulated_gradients : The same in one function.
    lasagne_accum.function : The same, run for you.

    Notes
    -----
    The identity that holds, and when it does not, is that of
    :func:`with_accumulated_gradients`. This form is the fastest one: the
    rule costs nothing between boundaries, and Theano adds the product of a
    matrix gradient straight into its accumulator.

    Examples
    --------
    >>> import lasagne_accum
    >>> import lasagne, theano
    >>> w, x = theano.shared(0.0, name="w"), theano.tensor.dscalar("x")
    >>> accumulate, mean_grads, reset = lasagne_accum.accumulate_gradients(
    ...     (w - x) ** 2, [w]
    ... )
    >>> apply = lasagne.updates.sgd(mean_grads, [w], learning_rate=0.5)
    >>> apply.update(reset)
    >>> train = theano.function([x], updates=accumulate)
    >>> step = theano.function([], updates=apply)
    >>> train(1.0), train(3.0), step(), float(w.get_value())
    ([], [], [], 2.0)
    """
    backend, params = _checked_params(params, loss_or_grads, weight)
    window = _open_window(
        backend,
        loss_or_grads,
        params,
        weight=weight,
        skip_nonfinite=skip_nonfinite,
        accumulator_dtype=accumulator_dtype,
        statistics=statistics,
    )

    means, reset = _means(window, window.held), _reset(window)
    nothing = backend.tensor.eq(window.held.weight, 0)
    for average, mean in zip(window.averages, means[len(params) :]):
        reset[average] = backend.tensor.switch(nothing, average, mean)
    return _collect(window), means[: len(params)], reset


class AccumulatedUpdates(state.Saved, OrderedDict):  # numpydoc ignore=PR01
    """The updates of a rule, held back until their window is complete.

    It is made by :func:`with_accumulated_gradients`. Changes to what the
    rule does belong in the rule: an update that is put on this dictionary
    afterwards is made on every call. It is for one thread at a time.

    Attributes
    ----------
    accumulators : list of shared variables
        The running (weighted) gradient sum of each parameter.
    counter : shared scalar or None
        The number of calls collected so far. None where every call applies.
    updated : symbolic bool
        True exactly on the calls that change the parameters.
    """

    def __init__(self, backend, window, rule, means=(), N=1, gate="switch"):
        super().__init__()
        self._backend, self._window, self._rule = backend, window, rule
        self._means, self._N, self._gate = means, N, gate
        self._apply = None

        self.accumulators, self.counter = [], None
        self.updated, self._own = backend.tensor.constant(True), rule
        if window is not None:
            self.updated, self._own = _gated(window, rule, means, N, gate)
            if window.pairs:
                self.accumulators = _accumulators(window)
                self.counter = window.held.calls
        self.update(self._own)

    @property
    def skipped(self):  # numpydoc ignore=RT01
        """The number of calls that ``skip_nonfinite`` has skipped so far."""
        return _skipped_count(self._window)

    def flush(self):
        """Apply the mean of what an unfinished window holds, and empty it.

        The first call compiles a function for it, without the ``givens`` of
        the training function.

        Returns
        -------
        bool
            Whether the parameters were changed: False if nothing was
            collected, or nothing of positive weight.

        Raises
        ------
        ValueError
            If the rule needs an input of the training function, such as a
            learning rate that is not held in a shared variable; or if
            something is collected by ``updates.momentum(in_place=True)``.
        """
        if self.counter is None or not self.counter.get_value():
            return False

        _check_flushable(self._window)
        if self._window.held.weight.get_value() == 0:
            self.reset()
            return False

        if self._apply is None:
            self._apply = self._compiled_apply()
        self._apply()
        return True

    def reset(self):
        """Empty the window: forget what was collected, and nothing else."""
        for variable in self._window.pairs if self._window else ():
            variable.zero(borrow=True)

    def copy(self):
        """Copy the dictionary alone, without its window.

        Returns
        -------
        OrderedDict
            The same as ``OrderedDict(self)``.
        """
        return OrderedDict(self)

    __copy__ = copy

    def __or__(self, other):
        return OrderedDict([*self.items(), *other.items()])

    def __ror__(self, other):
        return OrderedDict([*other.items(), *self.items()])

    def _state_variables(self):
        moving = self._backend.self_updating(list(self.values()))
        return list(OrderedDict.fromkeys([*self, *moving]))

    def _compiled_apply(self):
        """Compile the rule for the mean of what is held before a call."""
        means = _means(self._window, self._window.held)
        updates = self._backend.clone(
            list(self._rule.values()), replace=dict(zip(self._means, means))
        )
        missing = self._backend.missing_inputs(updates)
        if missing:
            raise ValueError(
                "`flush` must find all that the update rule needs in shared "
                f"variables, got the function input {_name(missing[0])}. "
                "Hold it in a shared variable."
            )
        updates = OrderedDict(zip(self._rule, updates))
        updates.update(_reset(self._window))
        return self._backend.function([], [], updates=updates)

    def _own_variables(self):
        """List what the rule itself updates."""
        averages = self._window.averages if self._window else ()
        return [v for v in self._rule if v not in averages]

    def _with_rule(self, change):
        """Change the rule's updates behind the gate, over the same window."""
        for variable, update in self._own.items():
            if self.get(variable) is not update:
                raise ValueError(
                    "`updates` must be as `with_accumulated_gradients` made "
                    f"them, got another update of {_name(variable)}. Change "
                    "it inside the update rule instead."
                )

        rule = _checked_updates(change, self._rule)
        updates = AccumulatedUpdates(
            self._backend,
            self._window,
            rule,
            self._means,
            self._N,
            self._gate,
        )
        for variable in self:
            updates.setdefault(variable, self[variable])
        return updates


_Totals = namedtuple("_Totals", "sums calls weight")
_Window = namedtuple(
    "_Window",
    "backend params averages held collected pairs accepted skipped kept",
)


def _open_window(
    backend,
    loss_or_grads,
    params,
    N=None,
    weight=None,
    skip_nonfinite=False,
    accumulator_dtype=None,
    statistics=(),
    positive=False,
    count=1,
):
    """Make a window's variables, and say what one call makes of them.

    `positive` says that the weight needs no check; a call that counts adds
    `count` to the number of calls.

    The fields of a window: `averages`, the running averages that it moves;
    `held`, its totals before the call (`weight` is that of the sums: the
    number of calls if no weights are given); `collected`, its totals after
    the call; `pairs` of each shared variable that holds a total and its
    value after the call, empty if `N` is 1; `accepted`, does the call count,
    a symbolic bool or None for always; `skipped`, the shared number of calls
    that did not count, or None; and `kept`, those of `pairs` that are not
    emptied at a boundary.
    """
    grads = _checked_grads(backend, loss_or_grads, params)
    averages = _running_averages(backend, grads, loss_or_grads, statistics)
    grads += [average.default_update for average in averages]
    held = _empty_totals(
        backend, [*params, *averages], accumulator_dtype, N, weight is not None
    )
    if weight is not None:
        weight = _checked_weight(backend, weight, held.sums)

    grads = [
        backend.apart(grad.astype(total.dtype), total, held.calls)
        for grad, total in zip(grads, held.sums)
    ]
    weight, contributes, accepted = _screened(
        backend, grads, held, weight, positive, skip_nonfinite
    )
    collected = _collected(
        backend.tensor, held, grads, weight, count, contributes, accepted
    )
    pairs, skipped = OrderedDict(), None
    if N != 1:
        pairs.update(zip(held.sums, collected.sums))
        pairs[held.calls] = collected.calls
        pairs[held.weight] = collected.weight
    if skip_nonfinite:
        skipped = backend.zeros("int64", "window_skipped")
    return _Window(
        backend,
        params,
        averages,
        held,
        collected,
        pairs,
        accepted,
        skipped,
        kept=(),
    )


def _empty_totals(backend, params, accumulator_dtype, N, weighted):
    def zeros(dtype, name, like=None):
        if N == 1:
            return backend.tensor.constant(0, dtype=dtype)
        return backend.zeros(dtype, name, like)

    sums = [
        zeros(
            _accumulator_dtype(param, accumulator_dtype),
            f"{param.name or f'param_{i}'}_accumulator",
            param,
        )
        for i, param in enumerate(params)
    ]
    calls = zeros(_counter_dtype(N), "window_counter")
    # float64 holds any sum of whole weights exactly up to 2**53.
    weight = zeros("float64", "window_weight") if weighted else calls
    return _Totals(sums, calls, weight)


def _screened(backend, grads, held, weight, positive, skip_nonfinite):
    """Tell a call's weight, whether it contributes, and whether it counts."""
    T, finite = backend.tensor, None
    if skip_nonfinite:
        finite = T.all([*map(backend.is_finite, grads, held.sums)])
    if weight is None:
        return None, finite, finite

    low, high = (
        T.constant(limit, dtype="float64")
        for limit in _weight_range(held.sums)
    )
    valid = T.le(held.weight + weight, high)
    valid = T.and_(T.or_(T.eq(weight, 0), T.ge(weight, low)), valid)
    weight = T.switch(valid, weight, np.nan)
    if positive:
        return weight, finite, finite
    if not skip_nonfinite:
        return weight, T.neq(weight, 0), None
    contributes = T.and_(T.gt(weight, 0), finite)
    return weight, contributes, T.or_(contributes, T.eq(weight, 0))


def _collected(T, held, grads, weight, count, contributes, accepted):
    """Add one call to the totals."""

    def added(condition, total, amount):
        if condition is None:
            return total + amount
        # Not a masked amount: 0 * NaN is NaN, and -0.0 + 0.0 is 0.0.
        return T.switch(condition, total + amount, total)

    calls = added(accepted, held.calls, T.cast(count, held.calls.dtype))
    new_weight = calls
    if weight is not None:
        grads = [weight.astype(grad.dtype) * grad for grad in grads]
        new_weight = added(contributes, held.weight, weight)
    sums = [added(contributes, *pair) for pair in zip(held.sums, grads)]
    return _Totals(sums, calls, new_weight)


def _means(window, totals):
    """Divide the sums once, by what was collected; zeros for nothing."""
    T = window.backend.tensor
    divisor = T.switch(T.eq(totals.weight, 0), 1, totals.weight)
    return [
        (total / divisor.astype(total.dtype)).astype(param.dtype)
        for param, total in zip(
            [*window.params, *window.averages], totals.sums
        )
    ]


def _applied(window, means, update_fn, **kw):
    """Give what a rule makes of mean gradients, and the mean averages."""
    n = len(window.params)
    rule = _checked_updates(update_fn, means[:n], window.params, **kw)
    rule.update(zip(window.averages, means[n:]))
    return rule


def _collect(window):
    """Give the updates of a call that only collects."""
    updates = OrderedDict(window.pairs)
    # An explicit update takes the place of a variable's own.
    updates.update(zip(window.averages, window.averages))
    if window.skipped is not None:
        updates[window.skipped] = _skipped_after(window)
    return updates


def _skipped_after(window):
    T = window.backend.tensor
    return T.switch(window.accepted, window.skipped, window.skipped + 1)


def _skipped_count(window):
    if window is None or window.skipped is None:
        return 0
    return int(window.skipped.get_value(borrow=True))


def _accumulators(window):
    """List the variables that take memory for the gradients' sake."""
    return [] if window.kept else window.held.sums[: len(window.params)]


def _check_flushable(window):
    if window.kept:
        raise ValueError(
            "`flush` must find the gradients apart from the momentum, got "
            "updates with `in_place=True`. Complete the window, or leave "
            "`in_place` out."
        )


def _reset(window, means=()):
    """Give the updates that empty a window, once its `means` are used.

    A total is emptied in place of its mean, which Theano then may make in
    place of the total.
    """
    places = {
        held: mean
        for held, mean in zip(window.held.sums, means)
        if held.dtype == mean.dtype
    }
    return OrderedDict(
        (held, _emptied(window.backend.tensor, places.get(held, held)))
        for held in window.pairs
        if held not in window.kept
    )


def _emptied(T, total, when=None):
    """Make zeros of a total, always or where a condition holds.

    Theano makes them in place, and does nothing where the condition doesn't
    hold.
    """
    if total.ndim == 0:
        zero = T.zeros_like(total)
        return zero if when is None else T.switch(when, zero, total)
    start = None if when is None else T.switch(when, 0, total.shape[0])
    return T.set_subtensor(total[start:], 0)


def _gated(window, rule, means, N, gate):
    """Give the rule's updates, made at boundaries only, and the window's.

    Returns also the symbolic bool that is true when the rule's are made.
    """
    T = window.backend.tensor
    now = window.collected
    boundary = T.ge(now.calls, N)
    if window.accepted is not None:
        boundary = T.and_(window.accepted, boundary)
    updated = boundary

    new = list(rule.values())
    if now.weight is not now.calls:
        weighs = T.neq(now.weight, 0)
        updated = T.and_(boundary, weighs)
        new = _switched(T, weighs, new, rule)

    emptied = _reset(window, means)
    totals = [window.pairs[held] for held in emptied]
    if gate == "switch":
        gated = _switched(T, boundary, new, rule)
        gated += [_emptied(T, total, boundary) for total in totals]
    else:
        # The then branch is passed through, the else branch is copied.
        gated = window.backend.ifelse(
            T.eq(boundary, 0), [*rule, *totals], [*new, *emptied.values()]
        )
    updates = OrderedDict.fromkeys(rule)
    updates.update(window.pairs)
    updates.update(zip([*rule, *emptied], gated))
    if window.skipped is not None:
        updates[window.skipped] = _skipped_after(window)
    return updated, updates


def _switched(T, condition, new, rule):
    """Select new values where a condition holds, or the old ones."""
    for variable in rule:
        if not hasattr(variable, "broadcastable"):
            raise ValueError(
                '`gate` must be "lazy", and `weight` left out, for a rule '
                f"that updates more than tensors, got {_name(variable)}. "
                "Pass them so, or take lasagne_accum.function."
            )
    return [T.switch(condition, *pair) for pair in zip(new, rule)]


def _counter_dtype(N):
    """Give the smallest signed dtype that holds `N`, int64 for any `N`."""
    for dtype in ("int8", "int16", "int32"):
        if isinstance(N, int) and N <= np.iinfo(dtype).max:
            return dtype
    return "int64"


def _accumulator_dtype(param, dtype):
    if dtype is None:
        return "float32" if param.dtype == "float16" else param.dtype
    if dtype not in ("float16", "float32", "float64"):
        raise ValueError(
            "`accumulator_dtype` must be float16, float32 or float64, got "
            f"{dtype!r}. Leave it out for the parameters' own."
        )
    return dtype


def _name(variable):
    return variable.name or str(variable)


def _checked_params(params, *others):
    """Find the backend of all values, check the parameters as Lasagne does."""
    params = params if hasattr(params, "owner") else list(params)
    backend = _backend.of(params, *others)
    if backend.is_symbolic(params):
        raise TypeError(
            "`params` must be a list of shared variables, got the variable "
            f"{_name(params)}. Pass [{_name(params)}]."
        )

    for i, param in enumerate(params):
        if not backend.is_shared(param):
            raise ValueError(
                f"`params` must contain shared variables only, got {param} "
                f"as element {i}. Pass the shared variables it is made of; "
                "lasagne.utils.collect_shared_vars finds them."
            )
        if not hasattr(param, "broadcastable"):
            raise TypeError(
                f"`params` must be dense, got {_name(param)} of {param.type}. "
                "Pass a dense one, or the values of a theano.sparse.CSR."
            )
        if np.dtype(param.dtype).kind != "f":
            raise ValueError(
                "`params` must have floating-point dtypes, got "
                f"{_name(param)} of {param.dtype}. A mean gradient is none "
                "otherwise; update it in the rule or by hand."
            )
        if param in params[:i]:
            raise ValueError(
                "`params` must contain each variable once, got "
                f"{_name(param)} as elements {params.index(param)} and {i}. "
                "Pass it once."
            )
    return backend, params


def _check_gate(gate):
    if gate not in ("switch", "lazy"):
        raise ValueError(
            f'`gate` must be "switch" or "lazy", got {gate!r}. Leave it out '
            'for "switch", which works everywhere.'
        )


def _checked_N(backend, N):
    if isinstance(N, numbers.Integral) and not isinstance(N, bool) and N > 0:
        if N < 2**63:
            return int(N)
        raise ValueError(
            f"`N` must be at most 2**63 - 1, got {N}. Pass that for windows "
            "that `flush` alone completes."
        )
    if backend.is_symbolic(N):
        if N.ndim == 0 and np.dtype(N.dtype).kind in "iu":
            return N
        N = N.type
    integer = isinstance(N, numbers.Integral) and not isinstance(N, bool)
    raise (ValueError if integer else TypeError)(
        f"`N` must be a positive integer, got {N!r}. Pass 1 to apply every "
        "update."
    )


def _check_in_place(backend, N, options):
    """Refuse what gradients can't be collected in a velocity with."""
    if not isinstance(_checked_N(backend, N), int):
        raise ValueError(
            f"`in_place` must go with an int for N, got {_name(N)}. Leave "
            "`in_place` out."
        )
    for name, value in options.items():
        if value is not None and value is not False and value != ():
            raise ValueError(
                "`in_place` must go with equal weights in the parameters' "
                f"dtype, got {name}={value!r}. Leave one of the two out."
            )


def _weight_range(sums):
    """Give the least and largest weight that all dtypes of sums can hold."""
    dtypes = {"float64", *(total.dtype for total in sums)}
    narrow = [np.finfo(dtype) for dtype in dtypes]
    low, high = max(n.tiny for n in narrow), min(n.max for n in narrow)
    return float(low), float(high)


def _checked_weight(backend, weight, sums):
    if backend.is_symbolic(weight):
        if weight.ndim == 0:
            return weight.astype("float64")
        weight = weight.type
    elif isinstance(weight, numbers.Real) and 0 <= weight < np.inf:
        low, high = _weight_range(sums)
        number = getattr(weight, "item", lambda: weight)()
        if weight == 0 or low <= number <= high:
            return backend.tensor.constant(weight, dtype="float64")
        raise ValueError(
            f"`weight` must be 0 or from {low:.3g} to {high:.3g} in the "
            f"accumulators' dtypes, got {weight!r}. Scale it, or pass "
            'accumulator_dtype="float64".'
        )
    error = ValueError if isinstance(weight, numbers.Real) else TypeError
    raise error(
        "`weight` must be a finite number from 0 up or a symbolic scalar, "
        f"got {weight!r}. Pass the number of samples in the call, or leave "
        "it out for equal weights."
    )


def _checked_grads(backend, loss_or_grads, params):
    if not isinstance(loss_or_grads, (list, tuple)):
        loss_or_grads = backend.grad(loss_or_grads, params)
    if len(loss_or_grads) != len(params):
        raise ValueError(
            "`loss_or_grads` must have a gradient for each parameter, got "
            f"{len(loss_or_grads)} for {len(params)} parameters. Pass as "
            "many, in the same order."
        )

    grads = [backend.dense(grad) for grad in loss_or_grads]
    for grad, param in zip(grads, params):
        # A gradient may be broadcast to its parameter, not the other way.
        if grad.ndim != param.ndim or np.any(
            np.greater(param.broadcastable, grad.broadcastable)
        ):
            raise ValueError(
                "`loss_or_grads` must have gradients of the parameters' "
                f"shapes, got {grad.type} for {_name(param)} of {param.type}. "
                "Pass them in the same order."
            )
    return grads


def _running_averages(backend, grads, loss_or_grads, layers):
    """Find what a loss moves of the parameters that layers hold."""
    try:
        held = [param for layer in layers for param in layer.params]
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"`statistics` must be a list of layers, got {layers!r}. Pass "
            "such as lasagne.layers.get_all_layers gives."
        ) from error
    losses = (
        [] if isinstance(loss_or_grads, (list, tuple)) else [loss_or_grads]
    )
    averages = _sharing(backend.self_updating([*losses, *grads]), held)
    if layers and not averages:
        raise ValueError(
            "`statistics` must have layers whose running averages the loss "
            f"moves, got {layers} with none. Pass those that made the loss, "
            "not deterministic, or leave it out."
        )
    for i, average in enumerate(averages):
        # Theano would write the one in place while it reads the other.
        if _sharing(averages[:i], [average]):
            raise ValueError(
                "`statistics` must have layers that the loss uses once, got "
                f"{_name(average)} moved by two uses. Join their inputs, or "
                "pass batch_norm_update_averages=False to one get_output."
            )
    return averages


def _sharing(variables, others):
    """Take the variables that have their values in common with others."""
    held = [getattr(other, "container", None) for other in others]
    return [v for v in variables if any(v.container is c for c in held)]


def _once_each(name, updates):
    """Make a dictionary of updates; refuse two of the same variable."""
    try:
        pairs = list(getattr(updates, "items", lambda: updates)())
        once = OrderedDict(pairs)
    except (TypeError, ValueError):
        once = {None: None}
    if not all(hasattr(variable, "get_value") for variable in once):
        raise TypeError(
            f"`{name}` must give shared variables their updates, in a "
            f"dictionary or list of pairs, got {updates!r}. See "
            "lasagne.updates for examples."
        )
    if len(once) < len(pairs):
        variables = [variable for variable, _ in pairs]
        twice = next(v for v in once if variables.count(v) > 1)
        raise ValueError(
            f"`{name}` must update each variable once, got several updates "
            f"of {_name(twice)}. Leave one."
        )
    return once


def _checked_updates(update_fn, *args, **kw):
    """Call a rule; refuse an update that its variable could not take."""
    updates = _once_each("update_fn", update_fn(*args, **kw))
    for variable, update in updates.items():
        try:
            updates[variable] = _backend.as_update(variable, update)
        except TypeError as error:
            raise TypeError(
                "`update_fn` must return updates of their variables' types, "
                f"got {getattr(update, 'type', repr(update))} for "
                f"{_name(variable)} of {variable.type}. Cast it inside the "
                "rule, or set Theano's floatX to the parameters' dtype."
            ) from error
    return updates
