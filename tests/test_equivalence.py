"""N calls end where one call of the rule on the whole batch would have."""

import functools
from collections import OrderedDict

from lasagne_accum import (
    AccumulatedUpdates,
    accumulate_gradients,
    with_accumulated_gradients,
)

import numpy as np
import pytest
import reference
from backend import RULES, T, rules, theano, with_lasagne
from numpy.testing import assert_allclose, assert_array_equal

pytestmark = pytest.mark.usefixtures("fast_compile")

# Adding up to 300 terms of one sign rounds up to 300 times by eps / 2 at
# most, in each of two windows.
TOLERANCE = {d: 300 * np.finfo(d).eps for d in ("float32", "float64")}

WINDOWS, SAMPLES = 2, 2  # windows to train, samples in a micro-batch

# Fractions that are exact in binary: the same in float32 as in float64.
HYPER = {
    "momentum": {"momentum": 0.75},
    "nesterov_momentum": {"momentum": 0.75},
    "rmsprop": {"rho": 0.75},
    "adadelta": {"rho": 0.75, "epsilon": 0.125},
    "adam": {"beta1": 0.5, "beta2": 0.75},
    "adamax": {"beta1": 0.5, "beta2": 0.75},
    "amsgrad": {"beta1": 0.5, "beta2": 0.75},
}


every_rule = pytest.mark.parametrize("name", sorted(RULES))


def hyper(name):
    return dict(HYPER.get(name, {}), learning_rate=0.0625)


def windows(N, dtype):
    """Make the micro-batches of each window.

    Inputs are positive and targets far off, so that all terms of a gradient
    have the same sign and no rule divides by next to nothing.
    """
    rng = np.random.RandomState(N)
    x = rng.uniform(0.5, 1.5, (WINDOWS, N, SAMPLES, 3))
    y = rng.uniform(2, 3, (WINDOWS, N, SAMPLES, 2)) * [1, -1]
    return list(zip(x.astype(dtype), y.astype(dtype)))


def start(dtype):
    return [
        np.arange(-3, 3).reshape(3, 2).astype(dtype) / 64,
        np.zeros(2, dtype),
    ]


def regression(dtype):
    """Make a linear regression: parameters, inputs, mean loss."""
    params = [theano.shared(p) for p in start(dtype)]
    x, y = T.matrix(dtype=dtype), T.matrix(dtype=dtype)
    errors = x.dot(params[0]) + params[1] - y
    return params, [x, y], (errors**2).sum(axis=1).mean() / 2


def regression_grads(params, x, y):
    """Work out the gradients of the same loss in NumPy."""
    errors = x.dot(params[0]) + params[1] - y
    return [x.T.dot(errors) / len(x), errors.mean(axis=0)]


def train_windows(call, N, dtype):
    """Call once for each micro-batch of each window."""
    for window in windows(N, dtype):
        for x, y in zip(*window):
            call(x, y)


@functools.lru_cache(maxsize=None)
def by_reference(name, N, dtype):
    """Train in float64 with the reference; return the parameters."""
    params = start("float64")
    rule, defaults = reference.RULES[name]
    window = reference.Window(params, rule, N, **dict(defaults, **hyper(name)))
    train_windows(
        lambda x, y: window.call(
            regression_grads(params, x.astype(float), y.astype(float))
        ),
        N,
        dtype,
    )
    return params


@functools.lru_cache(maxsize=None)
def whole_batches(name, dtype):
    """Compile the unmodified rule; return a function of the window size."""
    params, inputs, loss = regression(dtype)
    updates = RULES[name](loss, params, **hyper(name))
    train = theano.function(inputs, updates=updates)
    before = values(updates)

    @functools.lru_cache(maxsize=None)
    def run(N):
        restore(updates, before)
        for x, y in windows(N, dtype):
            train(x.reshape(-1, 3), y.reshape(-1, 2))
        return values(params), values(rule_variables(updates))

    return run


def rule_variables(updates):
    """List all that updates change, without the window's own."""
    if not isinstance(updates, AccumulatedUpdates):
        return list(updates)
    window = [*updates.accumulators, updates.counter]
    return [v for v in updates if v not in window]


def values(variables):
    return [v.get_value() for v in variables]


def restore(variables, values):
    for variable, value in zip(variables, values):
        variable.set_value(value)


def assert_close(actual, expected, dtype):
    """Compare arrays, each to the rounding of its largest element."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert a.dtype == dtype
        assert_allclose(
            a, e, TOLERANCE[dtype], TOLERANCE[dtype] * abs(e).max()
        )


def assert_trained(params, variables, name, N):
    """Compare parameters and the rule's variables with both oracles."""
    dtype = params[0].dtype
    whole_params, whole_variables = whole_batches(name, dtype)(N)
    assert_close(values(params), whole_params, dtype)
    assert_close(values(variables), whole_variables, dtype)
    assert_close(values(params), by_reference(name, N, dtype), dtype)


def test_every_rule_has_a_reference():
    lacking = set() if with_lasagne else {"amsgrad"}
    assert set(RULES) == set(reference.RULES) - lacking


# ------------------------------------------------- each rule, in each form


# 127 is the last count that fits int8; 300 calls are long enough to show
# rounding, and take their time.
@pytest.mark.parametrize(
    ("name", "N"),
    [(name, N) for name in sorted(RULES) for N in (1, 2, 5, 127, 128)]
    + [("sgd", 300), ("adam", 300)],
)
def test_N_calls_equal_the_whole_batch(name, N, floatX):
    params, inputs, loss = regression(floatX)
    updates = with_accumulated_gradients(
        loss, params, N, RULES[name], **hyper(name)
    )
    train = theano.function(inputs, updates=updates)

    train_windows(train, N, floatX)
    assert_trained(params, rule_variables(updates), name, N)


@every_rule
def test_N_calls_equal_the_whole_batch_if_N_is_shared(name, floatX, gate):
    params, inputs, loss = regression(floatX)
    N = theano.shared(0)
    updates = with_accumulated_gradients(
        loss, params, N, RULES[name], gate=gate, **hyper(name)
    )
    train = theano.function(inputs, updates=updates)
    before = values(updates)

    for size in (1, 2, 5, 128):
        restore(updates, before)
        N.set_value(size)
        train_windows(train, size, floatX)
        assert_trained(params, rule_variables(updates), name, size)


@every_rule
def test_two_functions_equal_the_whole_batch(name, floatX):
    params, inputs, loss = regression(floatX)
    accumulate, mean_grads, reset = accumulate_gradients(loss, params)
    updates = RULES[name](mean_grads, params, **hyper(name))
    train = theano.function(inputs, updates=accumulate)
    apply = theano.function(
        [], updates=list(updates.items()) + list(reset.items())
    )
    before = values(updates)

    for N in (1, 2, 5, 128):
        restore(updates, before)
        for window in windows(N, floatX):
            for x, y in zip(*window):
                train(x, y)
            apply()
        assert_trained(params, list(updates), name, N)


# In C, and with every rewriting of graphs that Theano knows.
@pytest.mark.compiled
def test_compiled_graph_equals_the_whole_batch(floatX, gate, in_c):
    params, inputs, loss = regression(floatX)
    updates = with_accumulated_gradients(
        loss, params, 5, RULES["adam"], gate=gate, **hyper("adam")
    )
    train = theano.function(inputs, updates=updates, mode="FAST_RUN")

    train_windows(train, 5, floatX)
    assert_trained(params, rule_variables(updates), "adam", 5)


@pytest.mark.compiled
def test_compiled_two_functions_equal_the_whole_batch(floatX, in_c):
    params, inputs, loss = regression(floatX)
    accumulate, mean_grads, reset = accumulate_gradients(loss, params)
    updates = RULES["adam"](mean_grads, params, **hyper("adam"))
    train = theano.function(inputs, updates=accumulate, mode="FAST_RUN")
    apply = theano.function(
        [],
        updates=list(updates.items()) + list(reset.items()),
        mode="FAST_RUN",
    )

    for window in windows(5, floatX):
        for x, y in zip(*window):
            train(x, y)
        apply()
    assert_trained(params, list(updates), "adam", 5)


@every_rule
def test_both_gates_give_the_same_bits(name, floatX):
    params, inputs, loss = regression(floatX)
    kept = start(floatX)
    trained = []
    for gate in ("switch", "lazy"):
        restore(params, kept)
        updates = with_accumulated_gradients(
            loss, params, 3, RULES[name], gate=gate, **hyper(name)
        )
        train = theano.function(inputs, updates=updates)
        trained.append([])
        for window in windows(4, floatX):  # ends within a third window
            for x, y in zip(*window):
                train(x, y)
                trained[-1].append(values(updates))

    for switch, lazy in zip(*trained):
        for a, b in zip(switch, lazy):
            assert_array_equal(a, b)


# --------------------------------------------- rules composed by the user


def momentum_on_rmsprop(grads, params):
    updates = rules.rmsprop(grads, params, learning_rate=0.0625)
    return rules.apply_momentum(updates, params, momentum=0.75)


def clipped_sgd(grads, params):
    if not isinstance(grads, list):
        grads = theano.grad(grads, params)
    grads = rules.total_norm_constraint(grads, 1.0)
    return rules.sgd(grads, params, learning_rate=0.0625)


def averaging_adam(grads, params):
    updates = rules.adam(grads, params, learning_rate=0.0625)
    for param in params:
        mean = theano.shared(param.get_value())
        updates[mean] = 0.75 * mean + 0.25 * updates[param]
    return updates


@pytest.mark.parametrize(
    "rule", [momentum_on_rmsprop, clipped_sgd, averaging_adam]
)
def test_composed_rules_equal_themselves_on_the_whole_batch(rule, floatX):
    params, inputs, loss = regression(floatX)
    accumulated = with_accumulated_gradients(loss, params, 5, rule)
    train = theano.function(inputs, updates=accumulated)
    train_windows(train, 5, floatX)
    trained = values(rule_variables(accumulated))

    restore(params, start(floatX))
    plain = rule(loss, params)
    train = theano.function(inputs, updates=plain)
    for x, y in windows(5, floatX):
        train(x.reshape(-1, 3), y.reshape(-1, 2))
    assert_close(trained, values(plain), floatX)


def linear(values):
    """Make a vector whose gradient is the input of the function."""
    param, grad = theano.shared(np.array(values, "float64")), T.dvector()
    return param, grad, (param * grad).sum()


def test_norm_constraint_in_a_rule_sees_the_mean_gradient():
    param, grad, loss = linear([0, 0])

    def rule(grads, params):
        grads = rules.total_norm_constraint(grads, 1.0, epsilon=0)
        return rules.sgd(grads, params, learning_rate=1.0)

    updates = with_accumulated_gradients(loss, [param], 2, rule)
    train = theano.function([grad], updates=updates)

    # The mean (3, 4) has norm 5. Constrained one by one, these gradients
    # would be (1, 0) and (0, 1), their mean (0.5, 0.5).
    train([6, 0])
    train([0, 8])
    assert_allclose(param.get_value(), [-0.6, -0.8], rtol=TOLERANCE["float64"])


def test_clipping_in_a_rule_sees_the_mean_gradient():
    param, grad, loss = linear([0, 0])

    def rule(grads, params):
        grads = [T.clip(grad, -1, 1) for grad in grads]
        return rules.sgd(grads, params, learning_rate=1.0)

    updates = with_accumulated_gradients(loss, [param], 2, rule)
    train = theano.function([grad], updates=updates)

    train([4, 0.5])
    train([-3, 9])
    assert_array_equal(param.get_value(), [-0.5, -1])


def test_averaged_parameters_in_a_rule_move_once_per_window():
    param, grad, loss = linear([0])
    mean = theano.shared(np.array([0.0]))

    def rule(grads, params):
        updates = rules.sgd(grads, params, learning_rate=1.0)
        updates[mean] = 0.5 * mean + 0.5 * updates[param]
        return updates

    updates = with_accumulated_gradients(loss, [param], 2, rule)
    train = theano.function([grad], updates=updates)

    means = []
    for g in (1, 3, 2, 6):  # the parameter goes to -2, then to -6
        train([g])
        means.extend(mean.get_value())
    assert means == [0, -1, -1, -3.5]


def test_decay_and_schedule_in_a_rule_advance_once_per_window():
    param, grad, loss = linear([8])
    t = theano.shared(np.array(0.0))

    def rule(grads, params):
        updates = OrderedDict([(t, t + 1)])
        for p, g in zip(params, grads):
            updates[p] = p - (g + 0.25 * p) / (t + 1)
        return updates

    updates = with_accumulated_gradients(loss, [param], 2, rule)
    train = theano.function([grad], updates=updates)

    steps = []
    for g in (1, 3, 2, 4):  # 8 - (2 + 2) = 4, then 4 - (3 + 1) / 2 = 2
        train([g])
        steps.append((float(t.get_value()), float(param.get_value()[0])))
    assert steps == [(0, 8), (1, 4), (1, 4), (2, 2)]
