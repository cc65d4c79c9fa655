"""Train with two compiled functions: one accumulates, one applies.

.. autosummary::
    :nosignatures:

    function
    AccumulatedFunction
"""

import _signal  # What `signal` wraps, in enumerations that take 20 us.
import contextlib
import numbers
import sys
import threading
import warnings
from collections import OrderedDict

import numpy as np

from . import state
from .accumulation import (
    _accumulators,
    _applied,
    _check_flushable,
    _check_in_place,
    _checked_N,
    _checked_params,
    _checked_updates,
    _collect,
    _means,
    _name,
    _once_each,
    _open_window,
    _reset,
    _sharing,
    _skipped_count,
)

__all__ = ["function", "AccumulatedFunction"]


def function(
    inputs,
    outputs,
    loss_or_grads,
    params,
    N=1,
    update_fn=None,
    *,
    weight=None,
    skip_nonfinite=False,
    accumulator_dtype=None,
    statistics=(),
    microbatch=None,
    in_place=False,
    updates=None,
    givens=None,
    mode=None,
    name=None,
    **kw,
):
    """Compile a training function that applies every Nth call.

    It is called like a Theano function, and returns `outputs`. On each
    call:

    * ``accumulator := accumulator + gradient``
    * ``counter := counter + 1``

    and after the calls that make ``counter`` reach `N`:

    * ``updates of update_fn(accumulator / counter, params, **kw)``
    * ``accumulator := 0``
    * ``counter := 0``

    Parameters
    ----------
    inputs : list of variables
        The inputs of the function, as in ``theano.function``.
    outputs : expression or list of expressions or None
        What a call returns, as in ``theano.function``. It is computed
        before the parameters change.
    loss_or_grads : symbolic expression or list of expressions
        A scalar loss expression, or a list of gradient expressions, one for
        each parameter and of its shape.
    params : list of shared variables
        The variables to update, none of them twice.
    N : int or symbolic integer scalar, optional
        The number of calls in a window, from 1 up. Defaults to 1.
    update_fn : function
        An update rule like those in ``lasagne.updates``.
    weight : float or symbolic scalar, optional
        The weight of a call, as in :func:`with_accumulated_gradients`.
        Defaults to equal weights.
    skip_nonfinite : bool, optional
        Whether to treat a call of positive weight with an infinity or a NaN
        in any gradient as if it had never come. Defaults to False.
    accumulator_dtype : str, optional
        The floating-point dtype of the accumulators. Defaults to the dtype
        of the parameter, float32 for float16.
    statistics : list of layers, optional
        The layers whose running averages move once for each window, as in
        :func:`with_accumulated_gradients`, whatever `outputs` are. Defaults
        to none.
    microbatch : int or "auto", optional
        Split what a call gets along the leading axis of its inputs into
        pieces of at most so many samples, and compute one after the other:
        the gradients are averaged, weighted by length or by the `weight` of
        each piece (all equally by a number), scalar outputs too, and all
        other outputs are joined along their leading axis. That must have a
        row for each sample; one that is as long as every piece by chance
        can't be told from it. Inputs without a batch axis (scalars, and
        those whose leading axis is broadcastable) go whole to every piece.
        "auto" starts from the whole batch and halves the pieces whenever
        memory runs out. Defaults to no splitting.
    in_place : bool, optional
        Whether to collect the gradients in the velocities of
        :func:`lasagne_accum.updates.momentum`, which takes no memory. See
        there for its conditions. Defaults to False.
    updates : dict or list of pairs, optional
        Further updates, made on each call or piece.
    givens : dict or list of pairs, optional
        Substitutions in the graph, as in ``theano.function``.
    mode : str or theano.compile.Mode, optional
        Theano's compilation mode.
    name : str, optional
        The name of the function, for Theano's profiles and messages.
    **kw
        Passed on to `update_fn`.

    Returns
    -------
    AccumulatedFunction
        The training function.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind, or the rule returns an update
        of another type than its variable's.
    ValueError
        If an argument has an impossible value.

    See Also
    --------
    with_accumulated_gradients : The same as updates for one function.

    Notes
    -----
    The identity that holds, and when it does not, is that of
    :func:`with_accumulated_gradients`; with `microbatch`, it holds for a
    single call on the whole batch.

    Memory: one accumulator for each parameter, whatever `N` is. Time: the
    rule costs nothing between boundaries, and Theano adds the product of a
    matrix gradient straight into its accumulator.

    The rule may use `inputs`, such as a learning rate, and what `updates`
    move: it sees the value that the call which completes the window saw.

    Examples
    --------
    >>> import lasagne_accum
    >>> import lasagne, theano
    >>> w, x = theano.shared(0.0, name="w"), theano.tensor.dvector("x")
    >>> loss = ((w - x) ** 2).mean()
    >>> train = lasagne_accum.function(
    ...     [x],
    ...     loss,
    ...     loss,
    ...     [w],
    ...     N=2,
    ...     microbatch=2,
    ...     update_fn=lasagne.updates.sgd,
    ...     learning_rate=0.5,
    ... )
    >>> float(train([1, 2, 3])), float(w.get_value()), train.pending
    (4.666666666666667, 0.0, 1)
    >>> float(train([6])), float(w.get_value()), train.pending
    (36.0, 3.0, 0)
    """
    backend, params = _checked_params(
        params, loss_or_grads, N, weight, inputs, outputs, updates, givens, kw
    )
    N = _checked_N(backend, N)
    givens = OrderedDict(
        (old, old.type.filter_variable(new))
        for old, new in OrderedDict(givens or ()).items()
    )
    if update_fn is None:
        raise TypeError(
            "`update_fn` must be an update rule, got None. Pass one, such as "
            "lasagne.updates.adam."
        )
    batch = [] if microbatch is None else _batch_inputs(inputs, microbatch)
    count = backend.zeros("int8", "call_count") if batch else None
    by_length = bool(batch) and weight is None
    if by_length:
        weight = _variable(inputs[batch[0]]).shape[0]
    options = {
        "weight": weight,
        "skip_nonfinite": skip_nonfinite,
        "accumulator_dtype": accumulator_dtype,
        "statistics": statistics,
    }

    if in_place and batch:
        raise ValueError(
            "`in_place` must go with whole calls, got "
            f"microbatch={microbatch!r}. Leave one of the two out."
        )
    if in_place:
        means = ()
        window, rule = _in_place(
            backend, loss_or_grads, params, N, update_fn, options, kw
        )
    else:
        window = _open_window(
            backend,
            loss_or_grads,
            params,
            positive=by_length,
            count=1 if count is None else count,
            **options,
        )
        means = _means(window, window.held)
        rule = _applied(window, means, update_fn, **kw)
    _check_split(backend, rule, [_variable(inputs[i]) for i in batch])
    trained = _compiled(
        window,
        rule,
        _reset(window, means),
        N,
        inputs,
        outputs,
        [weight] if batch else [],
        updates,
        {"givens": givens, "mode": mode, "name": name},
    )
    if batch:
        trained._pieces = _Pieces(trained, batch, count, microbatch)
    return trained


def _in_place(backend, loss_or_grads, params, N, update_fn, options, kw):
    """Make a window in the velocities of momentum, and the rule to apply."""
    open_window = getattr(update_fn, "in_place_window", None)
    if open_window is None:
        raise ValueError(
            "`in_place` must go with lasagne_accum.updates.momentum, got "
            f"{update_fn!r}. Pass it as `update_fn`, or leave `in_place` out."
        )
    _check_in_place(backend, N, options)
    window = open_window(backend, loss_or_grads, params, N, **kw)
    return window, _checked_updates(
        lambda: [
            (param, param + velocity)
            for param, velocity in zip(params, window.held.sums)
        ]
    )


def _compiled(
    window, rule, reset, N, inputs, outputs, weights, updates, settings
):
    """Compile a function that collects and one that applies."""
    backend = window.backend
    collected = _further_updates(updates, rule)
    rule, carried = _with_values_carried(
        backend, rule, settings["givens"], collected
    )
    collected.update(_collect(window))
    collected.update(carried)
    steps = backend.zeros("int64", "steps")
    applied = OrderedDict([*rule.items(), (steps, steps + 1)])
    applied.update(reset)

    single = not isinstance(outputs, (list, tuple, type(None)))
    outputs = [outputs] if single else list(outputs or [])
    for output in outputs:
        if not backend.is_symbolic(output):
            raise TypeError(
                "`outputs` must be an expression or a list of them, got "
                f"{output!r}. Pass the variables themselves."
            )
    extra = [N] if backend.is_symbolic(N) else []
    extra += map(backend.tensor.as_tensor_variable, weights)
    # Theano refuses a replacement that it has no use for.
    givens = backend.used(
        settings["givens"], [*outputs, *extra, *collected.values()]
    )
    moving = backend.self_updating(
        [*collected.values(), *outputs, *givens.values()]
    )
    # Another output of a network moves its averages by other variables.
    frozen = _sharing(moving, window.averages)
    moving = [v for v in moving if v not in frozen]
    mode, name = settings["mode"], settings["name"]
    accumulate = backend.function(
        inputs,
        outputs + extra,
        updates=collected,
        givens=givens,
        **({"no_default_updates": frozen} if frozen else {}),
        mode=mode,
        name=name,
    )
    apply = backend.function(
        [], [], updates=applied, mode=mode, name=name and f"{name}_apply"
    )
    moved = [
        [*applied, *backend.self_updating(list(applied.values()))],
        [*collected, *moving],
    ]
    return AccumulatedFunction(
        window, accumulate, apply, steps, N, single, carried, *moved
    )


class AccumulatedFunction(state.Saved):  # numpydoc ignore=PR01
    """A training function that applies every Nth call.

    It is made by :func:`function`, and called like a Theano function, by one
    thread at a time.

    Attributes
    ----------
    accumulate, apply : Theano functions
        What runs on each call or piece, and at boundaries. Call neither.
    accumulators : list of shared variables
        The running (weighted) gradient sum of each parameter.
    updated : bool
        Whether the last call or flush changed the parameters.

    Notes
    -----
    Ctrl-C takes effect when the call under way is complete, its update
    included. Arguments that do not fit are refused before anything runs. A
    call that raises while it collects leaves the parameters and the state of
    the rule as they were, and the window empty, since it may have been half
    collected (with `in_place`, the velocities are the window); a
    ``RuntimeWarning`` says how many earlier calls went with it. Only a rule
    that fails itself, out of memory for one, may leave its variables half
    updated, as it does in Theano's own functions.
    """

    def __init__(
        self,
        window,
        accumulate,
        apply,
        steps,
        N,
        single,
        carried,
        applied,
        collected,
    ):
        self.accumulate, self.apply = accumulate, apply
        self.updated, self._pieces = False, None
        self.accumulators = _accumulators(window)
        self._window, self._steps = window, steps
        self._N, self._N_is_output = N, not isinstance(N, int)
        self._single = single
        self._any_shape, self._applied, self._collected = (
            carried,
            applied,
            collected,
        )
        given = [i for i in accumulate.maker.inputs if not i.shared]
        self._names = [i.name for i in given]
        containers = accumulate.input_storage[: len(given)]
        self._containers = dict(zip(self._names, containers))
        self._containers.update(enumerate(containers))

    def __call__(self, *args, **kwargs):
        """Collect a micro-batch, and apply if the window is complete.

        Parameters
        ----------
        *args, **kwargs
            The values of the inputs.

        Returns
        -------
        array or list of arrays
            The values of the outputs.
        """
        if kwargs or len(args) != len(self._names):
            self._check_given([*range(len(args)), *kwargs])
        args = [self._converted(*pair) for pair in enumerate(args)]
        kwargs = {key: self._converted(key, kwargs[key]) for key in kwargs}
        length = self._pieces and self._pieces.length(args, kwargs)
        with self._guarded():
            self.updated, before = False, self.pending
            if self._pieces:
                values = self._pieces.accumulate(args, kwargs, length)
            else:
                values = self.accumulate(*args, **kwargs)
            N = values.pop() if self._N_is_output else None
            if isinstance(self._N, int):
                N = self._N
            if before < self.pending and N <= self.pending:
                self.updated = self._apply()
        return values[0] if self._single else values

    @property
    def N(self):  # numpydoc ignore=RT01
        """The number of calls in a window. A positive integer may be set.

        If the window holds as many calls already, it ends with the next.
        """
        return self._N

    @N.setter
    def N(self, value):  # numpydoc ignore=GL08
        N = _checked_N(self._window.backend, value)
        if self._window.kept:
            raise ValueError(
                f"`N` must stay as it was with `in_place`, got {value}. Leave "
                "`in_place` out to change it."
            )
        if not isinstance(N, int):
            raise TypeError(
                f"`N` must be set to a positive integer, got {_name(N)}. "
                "Pass a symbolic one to `function`."
            )
        self._N = N

    @property
    def pending(self):  # numpydoc ignore=RT01
        """The number of calls that the unfinished window holds."""
        return int(self._window.held.calls.get_value(borrow=True))

    @property
    def steps(self):  # numpydoc ignore=RT01
        """The number of updates applied so far."""
        return int(self._steps.get_value(borrow=True))

    @property
    def skipped(self):  # numpydoc ignore=RT01
        """The number of calls or pieces that ``skip_nonfinite`` skipped."""
        return _skipped_count(self._window)

    def flush(self):
        """Apply the mean of what an unfinished window holds, and empty it.

        Returns
        -------
        bool
            Whether the parameters were changed: False if nothing was
            collected, or nothing of positive weight.

        Raises
        ------
        ValueError
            If something is collected with ``in_place=True``.
        """
        if self.pending:
            _check_flushable(self._window)
        with self._guarded():
            self.updated = self.pending > 0 and self._apply()
        return self.updated

    def reset(self):
        """Empty the window: forget what was collected, and nothing else."""
        for variable in self._window.pairs:
            variable.zero(borrow=True)

    def _check_given(self, given):
        """Refuse what Theano would, while that does no harm yet."""
        matched = [
            sum(key in given for key in {i, name})
            for i, name in enumerate(self._names)
        ]
        if len(given) > sum(matched) or any(
            times > 1 or (times == 0 and self._containers[i].required)
            for i, times in enumerate(matched)
        ):
            raise TypeError(
                f"The function must be called with {self._names}, got {given} "
                "(a number stands for a position). Pass each once."
            )

    def _converted(self, key, value):
        """Convert an argument as Theano will."""
        container = self._containers[key]
        try:
            return container.type.filter(
                value,
                strict=container.strict,
                allow_downcast=container.allow_downcast,
            )
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Input {key!r} must be of {container.type}, got a value that "
                f"is not: {error}"
            ) from error

    def _state_variables(self):
        return list(OrderedDict.fromkeys([*self._applied, *self._collected]))

    def _apply(self):
        if self._window.held.weight.get_value(borrow=True) == 0:
            self.reset()
            return False
        self.apply()
        return True

    def _saved(self):
        """Copy what a call may half write, but not the zeros of a window."""
        held = () if self.pending else self._window.pairs
        return [(v, v.get_value()) for v in self._collected if v not in held]

    def _restore(self, saved):
        self.reset()
        for variable, value in saved:
            variable.set_value(value)

    @contextlib.contextmanager
    def _guarded(self):
        """Empty the window if what is done with it fails."""
        lost = self.pending
        with _uninterrupted():
            try:
                yield
            except BaseException:
                self.reset()
                if lost:
                    warnings.warn(
                        f"The {lost} calls that the window held are lost, "
                        "since this one failed and may have been half "
                        "collected. Call them again.",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                raise


class _Pieces:
    """Accumulates a batch piece by piece."""

    def __init__(self, trained, batch, count, microbatch):
        self._trained, self._count = trained, count
        # An argument comes by its index or by its name.
        self._keys = {*batch, *(trained._names[i] for i in batch)}
        self._number = len(batch)
        self._auto = microbatch == "auto"
        self._size = sys.maxsize if self._auto else microbatch

    def length(self, args, kwargs):
        """Find the number of samples in a call."""
        arguments = [*enumerate(args), *kwargs.items()]
        # A sparse one has no len.
        lengths = [v.shape[0] for key, v in arguments if key in self._keys]
        if (
            len(lengths) != self._number
            or len(set(lengths)) != 1
            or lengths[0] == 0
        ):
            raise ValueError(
                "`inputs` with a batch axis must all be given, with the same "
                f"number of samples, at least one, got {lengths}. Hold what "
                "has no batch axis in a shared variable."
            )
        return lengths[0]

    def accumulate(self, args, kwargs, length):
        """Accumulate a call, in the largest pieces that fit into memory."""
        backend = self._trained._window.backend
        first_size = size = min(self._size, length)
        saved = self._trained._saved() if self._auto else None
        while True:
            try:
                values = self._accumulate(args, kwargs, length, size)
                break
            except Exception as error:
                full = self._auto and backend.is_out_of_memory(error)
                if size == 1 or not full:
                    raise
            # Out of the except clause, only Theano holds on to the piece.
            backend.free(self._trained.accumulate)
            self._trained._restore(saved)
            size = (size + 1) // 2

        if size < first_size:
            self._size = size
            warnings.warn(
                f"`microbatch` is {size} from now on, since {first_size} "
                f"samples at once ran out of memory. Pass {size} to start "
                "there.",
                RuntimeWarning,
                stacklevel=3,
            )
        return values

    def _accumulate(self, args, kwargs, length, size):
        before = self._trained.pending
        results, sizes = [], []
        for start in range(0, length, size):
            # A call counts once: with its first piece that counts.
            counts = self._trained.pending == before
            self._count.set_value(np.int8(counts))
            sizes.append(min(size, length - start))
            piece = slice(start, start + sizes[-1])
            results.append(
                self._trained.accumulate(
                    *(self._cut(piece, *pair) for pair in enumerate(args)),
                    **{k: self._cut(piece, k, kwargs[k]) for k in kwargs},
                )
            )
        weights = [result.pop() for result in results]
        for values in zip(*results):
            _check_rows(values, sizes)
        if len(results) == 1:
            return results[0]
        return [_joined(values, weights) for values in zip(*results)]

    def _cut(self, piece, key, value):
        return value[piece] if key in self._keys else value


def _check_rows(values, sizes):
    if values[0].ndim and [value.shape[0] for value in values] != sizes:
        raise ValueError(
            "`outputs` must be scalars or have a row for each sample, got "
            f"{[value.shape for value in values]} for pieces of {sizes} "
            "samples. Compute such an output in a function of its own."
        )


def _joined(values, weights):
    """Average scalars by weight, join other outputs along their first axis."""
    if values[0].ndim == 0:
        values, weights = np.array(values), np.array(weights, "float64")
        weighed = weights != 0
        with np.errstate(invalid="ignore"):  # Of no weight, it is NaN.
            mean = np.dot(values[weighed], weights[weighed]) / weights.sum()
        floating = values.dtype.kind == "f"
        return np.asarray(mean, values.dtype if floating else "float64")
    return np.concatenate(values)


@contextlib.contextmanager
def _uninterrupted():
    """Let Ctrl-C wait until a call is complete."""
    handler, caught = _signal.getsignal(_signal.SIGINT), []
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):
        yield
        return

    _signal.signal(_signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


def _check_split(backend, rule, split):
    """Refuse a rule that would see a piece of a batch for the batch."""
    for given in backend.missing_inputs(list(rule.values())):
        if given in split:
            raise ValueError(
                "`update_fn` must not read what `microbatch` splits, got "
                f"{_name(given)}. Pass what it needs as an input without a "
                "batch axis."
            )


def _variable(given):
    """Take the variable out of a ``theano.In``."""
    return getattr(given, "variable", given)


def _batch_inputs(inputs, microbatch):
    """Find the inputs to split: those with a leading axis to split along."""
    integer = isinstance(microbatch, numbers.Integral)
    integer = integer and not isinstance(microbatch, bool)
    if microbatch != "auto" and not (integer and microbatch > 0):
        string = isinstance(microbatch, str)
        raise (ValueError if integer or string else TypeError)(
            '`microbatch` must be a positive integer or "auto", got '
            f"{microbatch!r}. Leave it out for no splitting."
        )

    batch = [i for i, given in enumerate(inputs) if _has_batch_axis(given)]
    if not batch:
        raise ValueError(
            "`inputs` must have one with a batch axis to split for "
            f"`microbatch`, got {inputs}. Pass the batch itself, or leave "
            "`microbatch` out."
        )
    return batch


def _has_batch_axis(given):
    variable = _variable(given)
    # A sparse matrix is never broadcast.
    sparse = [False] * getattr(variable, "ndim", 0)
    return not all(getattr(variable, "broadcastable", sparse)[:1])


def _with_values_carried(backend, rule, givens, further):
    """Let the rule, in a function of its own, see what the last call saw.

    That is its inputs, and what `further` updates have moved since. Returns
    also the updates that carry them over, in shared variables.
    """
    values = backend.clone(
        list(rule.values()), replace=OrderedDict(givens or ())
    )
    carried = OrderedDict(
        (backend.empty_like(seen), seen)
        for seen in [
            *backend.missing_inputs(values),
            *backend.used({v: v for v in further}, values),
        ]
    )
    values = backend.clone(
        values, replace={seen: held for held, seen in carried.items()}
    )
    return OrderedDict(zip(rule, values)), carried


def _further_updates(updates, rule):
    further = _once_each("updates", updates or ())
    for variable in further:
        if variable in rule:
            raise ValueError(
                "`updates` must not have what the update rule updates, got "
                f"{_name(variable)}. Update it in the rule or here."
            )
    return further
