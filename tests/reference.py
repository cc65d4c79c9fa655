"""
Update rules and windows in plain NumPy, to hold the library against.

Nothing here imports Theano, Lasagne or lasagne_accum: `RULES` are nine update
rules, `Window` is what accumulation means.

A rule is called as ``rule(params, grads, state, **hyper)``. `params` is a
list of arrays, changed in place; `grads` a list of as many arrays; `state` a
dictionary, empty at first, in which the rule keeps what it remembers. The
hyperparameters and their defaults are Lasagne's. Parameters and state keep
the parameters' dtype, single numbers such as `a_t` are Python floats.
"""

import math

import numpy as np


def sgd(params, grads, state, *, learning_rate):
    for p, g in zip(params, grads):
        p[...] = p - learning_rate * g


def momentum(params, grads, state, *, learning_rate, momentum=0.9):
    for p, g, v in zip(params, grads, _slot(state, "v", params)):
        v[...] = momentum * v - learning_rate * g
        p[...] = p + v


def nesterov_momentum(params, grads, state, *, learning_rate, momentum=0.9):
    for p, g, v in zip(params, grads, _slot(state, "v", params)):
        v[...] = momentum * v - learning_rate * g
        p[...] = p + momentum * v - learning_rate * g


def adagrad(params, grads, state, *, learning_rate=1.0, epsilon=1e-6):
    for p, g, r in zip(params, grads, _slot(state, "r", params)):
        r[...] = r + g**2
        p[...] = p - learning_rate * g / np.sqrt(r + epsilon)


def rmsprop(params, grads, state, *, learning_rate=1.0, rho=0.9, epsilon=1e-6):
    for p, g, r in zip(params, grads, _slot(state, "r", params)):
        r[...] = rho * r + (1 - rho) * g**2
        p[...] = p - learning_rate * g / np.sqrt(r + epsilon)


def adadelta(
    params, grads, state, *, learning_rate=1.0, rho=0.95, epsilon=1e-6
):
    rs, ss = _slot(state, "r", params), _slot(state, "s", params)
    for p, g, r, s in zip(params, grads, rs, ss):
        r[...] = rho * r + (1 - rho) * g**2
        step = g * np.sqrt(s + epsilon) / np.sqrt(r + epsilon)
        s[...] = rho * s + (1 - rho) * step**2
        p[...] = p - learning_rate * step


def adam(
    params, grads, state, *,
    learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
):  # fmt: skip
    t = _tick(state)
    a_t = learning_rate * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    ms, vs = _slot(state, "m", params), _slot(state, "v", params)
    for p, g, m, v in zip(params, grads, ms, vs):
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g**2
        p[...] = p - a_t * m / (np.sqrt(v) + epsilon)


def adamax(
    params, grads, state, *,
    learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8
):  # fmt: skip
    t = _tick(state)
    a_t = learning_rate / (1 - beta1**t)
    ms, us = _slot(state, "m", params), _slot(state, "u", params)
    for p, g, m, u in zip(params, grads, ms, us):
        m[...] = beta1 * m + (1 - beta1) * g
        u[...] = np.maximum(beta2 * u, abs(g))
        p[...] = p - a_t * m / (u + epsilon)


def amsgrad(
    params, grads, state, *,
    learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
):  # fmt: skip
    t = _tick(state)
    a_t = learning_rate * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    ms, vs = _slot(state, "m", params), _slot(state, "v", params)
    for p, g, m, v, v_max in zip(
        params, grads, ms, vs, _slot(state, "v_max", params)
    ):
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g**2
        v_max[...] = np.maximum(v_max, v)
        p[...] = p - a_t * m / (np.sqrt(v_max) + epsilon)


def _slot(state, name, params):
    return state.setdefault(name, [np.zeros_like(p) for p in params])


def _tick(state):
    state["t"] = state.get("t", 0) + 1
    return state["t"]


#: name -> (rule, its default hyperparameters)
RULES = {
    rule.__name__: (rule, dict(rule.__kwdefaults__ or {}))
    for rule in (
        sgd, momentum, nesterov_momentum, adagrad, rmsprop, adadelta,
        adam, adamax, amsgrad,
    )
}  # fmt: skip


class Window:
    """
    Collect gradients over N calls, then apply `rule` once to their mean.

    `params` are changed in place, `N` may be assigned at any time, `dtype`
    is that of the sums (default: the parameter's, float32 for float16).
    `pending` counts the calls collected, `skipped` those left out and
    `steps` the updates applied; `state` is the rule's.
    """

    def __init__(
        self, params, rule, N, *, skip_nonfinite=False, dtype=None, **hyper
    ):
        self.params, self.rule, self.hyper = params, rule, hyper
        self.N, self.skip_nonfinite, self.dtype = N, skip_nonfinite, dtype
        self.state, self.skipped, self.steps = {}, 0, 0
        self.reset()

    def call(self, grads, weight=1):
        """Collect `grads`; return whether this call updated `params`."""
        # Negative and infinite weights are as bad as NaN.
        if not 0 <= weight < math.inf:
            weight = math.nan
        if self.skip_nonfinite and _is_bad(grads, weight):
            self.skipped += 1
            return False

        self.pending += 1
        self.weight += weight
        if weight != 0:
            self._add(grads, weight)
        return self.flush() if self.pending >= self.N else False

    @np.errstate(all="ignore")
    def flush(self):
        """Apply what is pending; return whether this updated `params`."""
        sums, weight = self.sums, self.weight
        self.reset()
        if weight == 0:
            return False

        means = [
            (s / weight).astype(p.dtype) for s, p in zip(sums, self.params)
        ]
        self.rule(self.params, means, self.state, **self.hyper)
        self.steps += 1
        return True

    def reset(self):
        """Forget what is pending."""
        self.pending, self.weight = 0, 0
        self.sums = [np.zeros(p.shape, self._dtype(p)) for p in self.params]

    @np.errstate(all="ignore")
    def _add(self, grads, weight):
        for s, g in zip(self.sums, grads):
            s[...] = s + weight * np.asarray(g, s.dtype)

    def _dtype(self, param):
        return self.dtype or np.promote_types(param.dtype, "float32")


def _is_bad(grads, weight):
    finite = all(np.isfinite(g).all() for g in grads)
    return math.isnan(weight) or (weight > 0 and not finite)
