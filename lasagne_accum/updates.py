r"""The update rules of ``lasagne.updates``, each with ``average=``.

Import this module in place of ``lasagne.updates``:

.. autosummary::
    :nosignatures:

    sgd
    momentum
    nesterov_momentum
    adagrad
    rmsprop
    adadelta
    adam
    adamax
    amsgrad
    apply_momentum
    apply_nesterov_momentum
    norm_constraint
    total_norm_constraint

Every rule takes Lasagne's own arguments, and by keyword `average`,
`grads_clip`, `noise`, `weight`, `gate`, `skip_nonfinite`,
`accumulator_dtype` and `statistics`; :func:`momentum` also `in_place`. With
``average=1`` and no other option a rule returns what Lasagne's returns.

Examples
--------
>>> from lasagne_accum import updates
>>> import theano
>>> w, x = theano.shared(0.0, name="w"), theano.tensor.dscalar("x")
>>> step = updates.sgd((w - x) ** 2, [w], learning_rate=0.5, average=2)
>>> train = theano.function([x], updates=step)
>>> train(1.0), float(w.get_value()), train(3.0), float(w.get_value())
([], 0.0, [], 2.0)
"""

import functools
import inspect
import numbers
from collections import OrderedDict

try:
    import lasagne
    from lasagne.updates import (
        get_or_compute_grads,
        norm_constraint,
        total_norm_constraint,
    )
except ImportError as error:
    raise ImportError(
        "`lasagne_accum.updates` must find Lasagne, whose rules it wraps, got "
        f"{error}. Install lasagne_accum[lasagne], or pass PyMC's rules to "
        "`accumulated`."
    ) from error

from . import _backend
from .accumulation import (
    AccumulatedUpdates,
    _check_gate,
    _check_in_place,
    _checked_grads,
    _checked_params,
    _checked_updates,
    _counter_dtype,
    _name,
    _Totals,
    _Window,
    accumulated,
)

__all__ = [
    "sgd",
    "apply_momentum",
    "momentum",
    "apply_nesterov_momentum",
    "nesterov_momentum",
    "adagrad",
    "rmsprop",
    "adadelta",
    "adam",
    "adamax",
    "amsgrad",
    "norm_constraint",
    "total_norm_constraint",
]


def apply_momentum(updates, params=None, momentum=0.9):
    """Add momentum to updates, behind their gate if they are accumulated.

    * ``velocity := momentum * velocity + updates[param] - param``
    * ``param := param + velocity``

    on the calls on which `updates` change `param`.

    Parameters
    ----------
    updates : OrderedDict
        A dictionary mapping parameters to update expressions.
    params : iterable of shared variables, optional
        The variables to apply momentum to. Defaults to all variables that
        the rule updates.
    momentum : float or symbolic scalar, optional
        The amount of momentum to apply. Defaults to 0.9.

    Returns
    -------
    OrderedDict
        A copy of `updates` with momentum updates for all `params`;
        :class:`lasagne_accum.AccumulatedUpdates` over the same window if
        `updates` are.

    Raises
    ------
    ValueError
        If `updates` are accumulated, but were changed since.

    Notes
    -----
    Lasagne's own function, put on accumulated updates, would move the
    parameters between boundaries. Use it inside the rule.
    """
    return _behind_gate(
        lasagne.updates.apply_momentum, updates, params, momentum
    )


def apply_nesterov_momentum(updates, params=None, momentum=0.9):
    """Add Nesterov momentum, behind the gate of accumulated updates.

    * ``velocity := momentum * velocity + updates[param] - param``
    * ``param := param + momentum * velocity + updates[param] - param``

    on the calls on which `updates` change `param`.

    Parameters
    ----------
    updates : OrderedDict
        A dictionary mapping parameters to update expressions.
    params : iterable of shared variables, optional
        The variables to apply momentum to. Defaults to all variables that
        the rule updates.
    momentum : float or symbolic scalar, optional
        The amount of momentum to apply. Defaults to 0.9.

    Returns
    -------
    OrderedDict
        A copy of `updates` with momentum updates for all `params`;
        :class:`lasagne_accum.AccumulatedUpdates` over the same window if
        `updates` are.

    Raises
    ------
    ValueError
        If `updates` are accumulated, but were changed since.

    Notes
    -----
    Lasagne's own function, put on accumulated updates, would move the
    parameters between boundaries. Use it inside the rule.
    """
    return _behind_gate(
        lasagne.updates.apply_nesterov_momentum, updates, params, momentum
    )


def _behind_gate(apply, updates, params, momentum):
    if isinstance(updates, AccumulatedUpdates):
        return updates._with_rule(
            lambda rule: apply(
                rule,
                # Not to the running averages, which are no parameters.
                updates._own_variables() if params is None else params,
                momentum=momentum,
            )
        )
    return apply(updates, params, momentum=momentum)


def _adamax(
    loss_or_grads,
    params,
    learning_rate=0.002,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
):
    """Adamax updates, a variant of Adam with the infinity norm [1]_.

    * ``t := t + 1``
    * ``m := beta1 * m + (1 - beta1) * gradient``
    * ``u := max(beta2 * u, abs(gradient))``
    * ``param := param - learning_rate / (1 - beta1**t) * m / (u + epsilon)``

    Parameters
    ----------
    loss_or_grads : symbolic expression or list of expressions
        A scalar loss expression, or a list of gradient expressions
    params : list of shared variables
        The variables to generate update expressions for
    learning_rate : float or symbolic scalar
        Learning rate
    beta1 : float or symbolic scalar
        Exponential decay rate for the first moment estimates.
    beta2 : float or symbolic scalar
        Exponential decay rate for the weighted infinity norm estimates.
    epsilon : float or symbolic scalar
        Constant for numerical stability.

    Returns
    -------
    OrderedDict
        A dictionary mapping each parameter to its update expression

    References
    ----------
    .. [1] Kingma, Diederik, and Jimmy Ba (2014):
           Adam: A Method for Stochastic Optimization.
           arXiv preprint arXiv:1412.6980.
    """
    backend = _backend.of(params)
    grads = get_or_compute_grads(loss_or_grads, params)
    one, t, updates = _step_counter(backend)
    rate = learning_rate / (one - beta1**t)

    for param, grad in zip(params, grads):
        m, u = (backend.zeros(param.dtype, like=param) for _ in range(2))
        updates[m] = beta1 * m + (one - beta1) * grad
        updates[u] = backend.tensor.maximum(beta2 * u, abs(grad))
        updates[param] = param - rate * updates[m] / (updates[u] + epsilon)
    return updates


def _amsgrad(
    loss_or_grads,
    params,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
):
    """AMSGrad updates, Adam with second moments that never shrink [1]_.

    * ``t := t + 1``
    * ``m := beta1 * m + (1 - beta1) * gradient``
    * ``v := beta2 * v + (1 - beta2) * gradient**2``
    * ``v_max := max(v_max, v)``
    * ``rate = learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t)``
    * ``param := param - rate * m / (sqrt(v_max) + epsilon)``

    Parameters
    ----------
    loss_or_grads : symbolic expression or list of expressions
        A scalar loss expression, or a list of gradient expressions
    params : list of shared variables
        The variables to generate update expressions for
    learning_rate : float or symbolic scalar
        Learning rate
    beta1 : float or symbolic scalar
        Exponential decay rate for the first moment estimates.
    beta2 : float or symbolic scalar
        Exponential decay rate for the second moment estimates.
    epsilon : float or symbolic scalar
        Constant for numerical stability.

    Returns
    -------
    OrderedDict
        A dictionary mapping each parameter to its update expression

    References
    ----------
    .. [1] Reddi, Sashank, Satyen Kale, and Sanjiv Kumar (2018):
           On the Convergence of Adam and Beyond. ICLR 2018.
    """
    backend = _backend.of(params)
    T = backend.tensor
    grads = get_or_compute_grads(loss_or_grads, params)
    one, t, updates = _step_counter(backend)
    rate = learning_rate * T.sqrt(one - beta2**t) / (one - beta1**t)

    for param, grad in zip(params, grads):
        m, v, v_max = (
            backend.zeros(param.dtype, like=param) for _ in range(3)
        )
        updates[m] = beta1 * m + (one - beta1) * grad
        updates[v] = beta2 * v + (one - beta2) * grad**2
        updates[v_max] = T.maximum(v_max, updates[v])
        step = rate * updates[m] / (T.sqrt(updates[v_max]) + epsilon)
        updates[param] = param - step
    return updates


def _step_counter(backend):
    t = backend.shared(lasagne.utils.floatX(0.0))
    # An integer constant, so that float32 is not upcast.
    return backend.tensor.constant(1), t + 1, OrderedDict([(t, t + 1)])


_OPTIONS = {
    "average": 1,
    "grads_clip": False,
    "noise": False,
    "weight": None,
    "gate": "switch",
    "skip_nonfinite": False,
    "accumulator_dtype": None,
    "statistics": (),
}


_DESCRIBED = """
average : int or symbolic integer scalar, optional
    The number of calls whose mean gradient makes one update. Defaults to 1.
grads_clip : bool or float, optional
    Clip the gradients of each call, before they are averaged, to [-c, c]:
    True for c = 1, or c itself. Defaults to False.
noise : bool or float, optional
    Add Gaussian noise to the gradients of each call, after clipping: True
    for a standard deviation of 1e-8, or the standard deviation. It is drawn
    from a stream that Lasagne's random generator seeds. Defaults to False.
weight, gate, skip_nonfinite, accumulator_dtype, statistics : optional
    As in :func:`lasagne_accum.with_accumulated_gradients`."""
_IN_PLACE_DESCRIBED = """
in_place : bool, optional
    Collect the gradients in the velocity, which takes no memory: multiply
    it by `momentum` on the first call of a window, subtract
    ``learning_rate / average * gradient`` from it on each call, and add it
    to the parameter on the last. The learning rate is that of each call. It
    needs an int `average` and equal weights, ``flush`` is refused, and
    ``reset`` empties the velocity too. Defaults to False."""


def _averaged(rule, in_place_window=None):
    """Give a rule the keyword arguments of this module."""
    defaults = dict(_OPTIONS)
    if in_place_window:
        defaults["in_place"] = False

    @functools.wraps(rule)
    def averaged(loss_or_grads, params, *args, **kw):
        options = {key: kw.pop(key, defaults[key]) for key in defaults}
        clip = _amount("grads_clip", options.pop("grads_clip"), 1.0)
        noise = _amount("noise", options.pop("noise"), 1e-8)
        if clip or noise:
            loss_or_grads = _distorted(loss_or_grads, params, clip, noise)
        N = options.pop("average")
        if options.pop("in_place", False):
            return _collected_in_place(
                loss_or_grads, params, N, options, *args, **kw
            )
        return accumulated(rule, N, **options)(
            loss_or_grads, params, *args, **kw
        )

    signature = inspect.signature(rule)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    averaged.__signature__ = signature.replace(
        parameters=[
            *signature.parameters.values(),
            *(
                inspect.Parameter(key, keyword_only, default=value)
                for key, value in defaults.items()
            ),
        ]
    )
    described = _DESCRIBED + _IN_PLACE_DESCRIBED * bool(in_place_window)
    averaged.__doc__ = inspect.getdoc(rule).replace(
        "\n\nReturns\n", described + "\n\nReturns\n", 1
    )
    averaged.__module__ = __name__
    averaged.__name__ = averaged.__qualname__ = rule.__name__.lstrip("_")
    averaged.in_place_window = in_place_window
    return averaged


def _amount(name, value, default):
    """Check an option that is a bool or a positive number."""
    if isinstance(value, bool):
        return default if value else 0.0
    if isinstance(value, numbers.Real) and 0 < value < float("inf"):
        return float(value)
    error = ValueError if isinstance(value, numbers.Real) else TypeError
    raise error(
        f"`{name}` must be True, False or a positive number, got {value!r}. "
        f"Pass True for {default:g}, or leave it out."
    )


def _distorted(loss_or_grads, params, clip, noise):
    """Clip the gradients of a call, then add noise to them."""
    backend, params = _checked_params(params)
    grads = _checked_grads(backend, loss_or_grads, params)
    if clip:
        limits = [backend.tensor.constant(clip, dtype=g.dtype) for g in grads]
        grads = [
            backend.tensor.clip(grad, -limit, limit)
            for grad, limit in zip(grads, limits)
        ]
    if noise:
        seed = lasagne.random.get_rng().randint(1, 2147462579)
        normal = backend.random_streams(seed).normal
        shapes = [backend.shape(param) for param in params]
        # The generator refuses empty shapes, which take no noise.
        grads = [
            grad
            if 0 in shape
            else grad + normal(shape, std=noise).astype(grad.dtype)
            for grad, shape in zip(grads, shapes)
        ]
    return grads


def _velocity_window(
    backend, loss_or_grads, params, N, learning_rate, momentum=0.9
):
    """Make a window whose sums are the velocities of momentum."""
    T = backend.tensor
    grads = _checked_grads(backend, loss_or_grads, params)
    velocities = [
        backend.zeros(param.dtype, f"{_name(param)}_velocity", param)
        for param in params
    ]
    calls = backend.zeros(_counter_dtype(N), "window_counter")
    new_calls = calls + T.constant(1, dtype="int8")
    decay, rate = T.switch(T.eq(calls, 0), momentum, 1), learning_rate / N

    pairs = OrderedDict(
        (v, T.cast(decay, v.dtype) * v - T.cast(rate * g, v.dtype))
        for v, g in zip(velocities, grads)
    )
    held = _Totals(velocities, calls, calls)
    collected = _Totals(list(pairs.values()), new_calls, new_calls)
    pairs[calls] = new_calls
    return _Window(
        backend,
        params,
        averages=[],
        held=held,
        collected=collected,
        pairs=pairs,
        accepted=None,
        skipped=None,
        kept=velocities,
    )


def _collected_in_place(loss_or_grads, params, N, options, *args, **kw):
    """Give the updates of momentum over a velocity window."""
    backend, params = _checked_params(params)
    gate = options.pop("gate")
    _check_gate(gate)
    _check_in_place(backend, N, options)
    window = _velocity_window(backend, loss_or_grads, params, N, *args, **kw)
    rule = OrderedDict(
        (param, param + velocity)
        for param, velocity in zip(params, window.collected.sums)
    )
    return AccumulatedUpdates(
        backend, window, _checked_updates(lambda: rule), N=N, gate=gate
    )


sgd = _averaged(lasagne.updates.sgd)
momentum = _averaged(lasagne.updates.momentum, _velocity_window)
nesterov_momentum = _averaged(lasagne.updates.nesterov_momentum)
adagrad = _averaged(lasagne.updates.adagrad)
rmsprop = _averaged(lasagne.updates.rmsprop)
adadelta = _averaged(lasagne.updates.adadelta)
adam = _averaged(lasagne.updates.adam)
adamax = _averaged(getattr(lasagne.updates, "adamax", _adamax))
amsgrad = _averaged(getattr(lasagne.updates, "amsgrad", _amsgrad))
