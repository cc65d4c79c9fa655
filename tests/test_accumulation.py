"""What a window does, call by call."""

import copy
import functools
import gc
import re
import resource
import sys
from collections import OrderedDict
from math import inf, nan
from types import SimpleNamespace

from lasagne_accum import (
    _backend,
    accumulate_gradients,
    accumulated,
    with_accumulated_gradients,
)

import numpy as np
import pytest
import reference
import scipy.sparse
from backend import (
    NumpyStreams,
    T,
    broadcast,
    not_theano_pymc,
    rules,
    theano,
    theano_only,
)
from numpy.testing import assert_allclose, assert_array_equal
from test_equivalence import (
    RULES,
    TOLERANCE,
    assert_close,
    every_rule,
    hyper,
    regression,
    restore,
    start,
    values,
)

pytestmark = pytest.mark.usefixtures("fast_compile")

sgd = functools.partial(rules.sgd, learning_rate=1.0)
adam = functools.partial(rules.adam, learning_rate=0.5)

# Theano makes float32 of float16 times a Python float.
half_sgd = functools.partial(rules.sgd, learning_rate=np.float16(1))

WEIGHT = "the last input of the function"


def shared(value, name=None, dtype="float64", broadcastable=None):
    pattern = broadcast(*broadcastable) if broadcastable else {}
    value = np.array(value, dtype)
    return theano.shared(value, name, **pattern)


def linear(params):
    """Make a loss whose gradients are the inputs of the function."""
    grads = [param.type() for param in params]
    return grads, sum((p * g).sum() for p, g in zip(params, grads))


def spied(update_fn, variables):
    """Make a rule that lists the variables that it updates."""

    @functools.wraps(update_fn)
    def rule(grads, params, **kw):
        updates = update_fn(grads, params, **kw)
        variables.extend(updates)
        return updates

    return rule


def training(N, update_fn=sgd, params=None, **options):
    """Train by calls of gradients, on a scalar `w` of 10 if left to itself.

    `call` tells whether it updated, `value` is that of the first parameter,
    and `variables` are those of the rule.
    """
    params, variables = params or [shared(10, "w")], []
    inputs, loss = linear(params)
    if options.get("weight") is WEIGHT:
        options["weight"] = T.dscalar("weight")
        inputs.append(options["weight"])
    updates = with_accumulated_gradients(
        loss, params, N, spied(update_fn, variables), **options
    )
    function = theano.function(inputs, updates.updated, updates=updates)
    return SimpleNamespace(
        updates=updates,
        variables=variables,
        w=params[0],
        call=lambda *args: bool(function(*args)),
        value=lambda: float(params[0].get_value()),
    )


def two_functions(update_fn=sgd, params=None, **options):
    """Train with a function that collects and another that applies."""
    params = params or [shared(10, "w")]
    inputs, loss = linear(params)
    if options.get("weight") is WEIGHT:
        options["weight"] = T.dscalar("weight")
        inputs.append(options["weight"])
    accumulate, mean_grads, reset = accumulate_gradients(
        loss, params, **options
    )
    updates = update_fn(mean_grads, params)
    updates.update(reset)
    return SimpleNamespace(
        accumulate=accumulate,
        reset=reset,
        w=params[0],
        call=theano.function(inputs, updates=accumulate),
        apply=theano.function([], mean_grads, updates=updates),
        value=lambda: float(params[0].get_value()),
    )


def bits(variables):
    return [v.get_value().tobytes() for v in variables]


def resident():
    """Tell how much memory this process takes, in bytes."""
    gc.collect()
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()


def window(updates):
    return [*updates.accumulators, updates.counter]


def assert_empty(updates):
    """Check that a window holds nothing."""
    for variable in window(updates):
        assert_array_equal(variable.get_value(), 0)


def refusal(error, text):
    """Expect an error of this text, and no other."""
    return pytest.raises(error, match="^" + re.escape(text) + "$")


# ------------------------------------------------------------- the boundary


@pytest.mark.parametrize("N", [1, 2, 4, 8])
def test_call_N_applies_the_mean_of_calls_1_to_N(N, gate):
    run = training(N, gate=gate)
    updated, steps = [], []
    for call in range(2 * N):
        before = run.value()
        updated.append(run.call(2**call))
        steps.append(before - run.value())

    # Sums of powers of two tell which calls are in them.
    idle, first = [0] * (N - 1), (2**N - 1) / N
    assert updated == ([False] * (N - 1) + [True]) * 2
    assert steps == [*idle, first, *idle, 2**N * first]


@every_rule
def test_all_of_a_rule_keeps_its_bits_between_boundaries(name, gate):
    params = [shared([[-0.0, 1], [2, 3]]), shared(-0.0)]
    run = training(3, RULES[name], params, gate=gate, learning_rate=0.5)

    for call in range(9):
        before = bits(run.variables)
        run.call([[1, -2 - call], [call, 4 + call]], 5 + call)
        moved = [a != b for a, b in zip(bits(run.variables), before)]
        assert moved == [call % 3 == 2] * len(moved)


def test_composed_rules_keep_their_bits_between_boundaries(gate):
    def rule(grads, params):
        updates = adam(grads, params)
        updates = rules.apply_momentum(updates, params)
        (w,), mean, decay = params, shared(1), shared(1)
        updates[mean] = 0.5 * mean + 0.5 * updates[w]
        updates[decay] = 0.5 * decay
        return updates

    run = training(2, rule, gate=gate)
    for call in range(4):
        before = bits(run.variables)
        run.call(1)
        moved = [a != b for a, b in zip(bits(run.variables), before)]
        assert moved == [call % 2 == 1] * len(moved)


def test_learning_rate_is_that_of_the_boundary(gate):
    rate = shared(1)
    run = training(2, rules.sgd, gate=gate, learning_rate=rate)
    rate.set_value(100)
    run.call(1)
    rate.set_value(2)
    run.call(3)
    assert run.value() == 6


def test_gradients_are_those_at_the_parameters_of_the_call():
    w, x = shared(0), T.dscalar()
    updates = with_accumulated_gradients((w - x) ** 2 / 2, [w], 2, sgd)
    train = theano.function([x], updates=updates)
    path = []
    for value in (1, 3, 1, 5):  # to 2, then by ((1 - 2) + (5 - 2)) / 2
        train(value)
        path.append(float(w.get_value()))
    assert path == [0, 2, 2, 3]


def test_windows_span_epochs():
    run = training(4)
    epochs = [[run.call(g) for g in epoch] for epoch in [(1, 2, 3), (6, 1)]]
    assert epochs == [[False] * 3, [True, False]]
    assert run.value() == 7


def test_evaluation_leaves_the_window_alone():
    run = training(2)
    x = T.dscalar()
    evaluate = theano.function([x], run.w * x)
    run.call(1)
    before = bits(run.updates)
    assert evaluate(2) == 20
    assert bits(run.updates) == before
    run.call(3)
    assert run.value() == 8


@pytest.mark.parametrize("together", [True, False])
def test_windows_of_different_size_are_independent(together, gate):
    v, w = shared(0, "v"), shared(0, "w")
    (g, h), loss = linear([v, w])
    pair = [
        with_accumulated_gradients(loss, [param], N, sgd, gate=gate)
        for param, N in [(v, 2), (w, 3)]
    ]
    options = {"inputs": [g, h], "on_unused_input": "ignore"}
    if together:
        pair = [OrderedDict([*pair[0].items(), *pair[1].items()])]
    functions = [theano.function(updates=u, **options) for u in pair]

    path = []
    for call in range(6):
        for function in functions:
            function(2**call, -(2**call))
        path.append((float(v.get_value()), float(w.get_value())))
    assert path == [
        (0, 0),
        (-1.5, 0),
        (-1.5, 7 / 3),
        (-7.5, 7 / 3),
        (-7.5, 7 / 3),
        (-31.5, 21),
    ]


# --------------------------------------------------------- without a window


def test_window_of_one_returns_the_updates_of_the_rule():
    made = []

    def rule(grads, params):
        made.append(adam(grads, params))
        return made[0]

    w = shared(10, "w")
    updates = with_accumulated_gradients(w**2, [w], 1, rule)
    assert list(updates.items()) == list(made[0].items())


def test_window_of_one_makes_no_variable():
    run = training(1)
    assert (list(run.updates), run.updates.accumulators) == ([run.w], [])
    assert run.updates.counter is None


@every_rule
def test_window_of_one_gives_the_bits_of_the_rule(name, floatX):
    params, inputs, loss = regression(floatX)
    x, y = np.random.RandomState(0).normal(size=(2, 5, 3)).astype(floatX)
    trained = []
    for rule in (
        RULES[name],
        functools.partial(
            with_accumulated_gradients, N=1, update_fn=RULES[name]
        ),
    ):
        restore(params, start(floatX))
        updates = rule(loss, params, **hyper(name))
        train = theano.function(inputs, updates=updates)
        train(x, y[:, :2])
        train(x, y[:, 1:])
        trained.append(bits(updates))
    assert trained[0] == trained[1]


def test_window_of_one_has_nothing_to_flush():
    run = training(1)
    assert run.call(1) is True
    assert run.updates.flush() is False
    run.updates.reset()
    assert run.value() == 9


# ------------------------------------------------------ what a window holds


@pytest.mark.parametrize(
    ("N", "dtype"),
    [
        (2, "int8"),
        (127, "int8"),
        (128, "int16"),
        (32767, "int16"),
        (32768, "int32"),
        (2**31 - 1, "int32"),
        (2**31, "int64"),
        (np.int64(4), "int8"),
        (np.uint8(200), "int16"),
    ],
)
def test_counter_is_a_scalar_that_just_holds_N(N, dtype):
    w = shared(0)
    updates = with_accumulated_gradients(w**2, [w], N, sgd)
    counter = updates.counter
    assert (counter.dtype, counter.ndim, counter.name) == (
        dtype,
        0,
        "window_counter",
    )
    assert counter.get_value() == 0


def test_counter_of_symbolic_N_takes_any():
    w = shared(0)
    updates = with_accumulated_gradients(w**2, [w], T.bscalar(), sgd)
    assert (updates.counter.dtype, updates.counter.ndim) == ("int64", 0)


@pytest.mark.parametrize("N", [np.int64(4), np.uint8(4)])
def test_numpy_integers_are_taken_as_N(N):
    run = training(N)
    assert [run.call(g) for g in (1, 2, 3, 6)] == [False] * 3 + [True]
    assert run.value() == 7


def test_counter_counts_and_starts_again(gate):
    run = training(3, gate=gate)
    counts = []
    for _ in range(6):
        run.call(1)
        counts.append(int(run.updates.counter.get_value()))
    assert counts == [1, 2, 0, 1, 2, 0]


def test_accumulators_hold_the_sums_of_gradients(gate):
    run = training(3, params=[shared([10, 20])], gate=gate)
    sums = []
    for g in (1, 2, 3, 4):
        run.call([g, -g])
        sums.append(run.updates.accumulators[0].get_value().tolist())
    assert sums == [[1, -1], [3, -3], [0, 0], [4, -4]]


def test_accumulators_are_of_the_kind_of_their_parameters():
    params = [
        shared(1, "scalar"),
        shared([1, 2], "vector", "float32"),
        shared([[1, 2]], None, broadcastable=(True, False)),
        shared(np.ones((0, 2)), "empty"),
    ]
    updates = with_accumulated_gradients(linear(params)[1], params, 2, sgd)
    assert [a.name for a in updates.accumulators] == [
        "scalar_accumulator",
        "vector_accumulator",
        "param_2_accumulator",
        "empty_accumulator",
    ]
    for accumulator, param in zip(updates.accumulators, params):
        assert accumulator.type == param.type
        zeros = np.zeros_like(param.get_value())
        assert_array_equal(accumulator.get_value(), zeros)
        assert accumulator.get_value().shape == zeros.shape


def test_window_costs_one_accumulator_each_and_one_counter():
    params = [shared(np.ones((3, 5)), "W"), shared(np.ones(7), "b")]
    run = training(127, adam, params)
    extra = [v for v in run.updates if v not in run.variables]
    assert sum(v.get_value().nbytes for v in extra) == 8 * (15 + 7) + 1
    assert len(extra) == 3


@pytest.mark.parametrize(
    ("N", "gate"), [(1, "switch"), (3, "switch"), (3, "lazy")]
)
def test_memory_that_a_window_takes_is_that_of_its_accumulators(N, gate):
    training(N, gate=gate).call(1)  # what a first time takes
    grad = np.ones(2**22)
    before = resident()
    run = training(N, sgd, [shared(grad, "w")], gate=gate)
    for _ in range(4):
        run.call(grad)
    taken = resident() - before

    # The parameter itself, and what else is taken or given back meanwhile.
    expected = (1 + (N > 1)) * grad.nbytes
    assert abs(taken - expected) < grad.nbytes / 4


@every_rule
def test_every_update_is_of_the_type_of_its_variable(name, floatX, gate):
    params, _, loss = regression(floatX)
    updates = with_accumulated_gradients(
        loss, params, 2, RULES[name], gate=gate, **hyper(name)
    )
    types = [variable.type for variable in updates]
    assert [update.type for update in updates.values()] == types


# ------------------------------------------------------------ flush, reset


@pytest.mark.parametrize("collected", [1, 2])
def test_flush_applies_the_mean_of_what_was_collected(collected, gate):
    run = training(3, gate=gate)
    for g in (2, 4)[:collected]:
        run.call(g)
    assert run.updates.flush() is True
    assert run.value() == {1: 8, 2: 7}[collected]


def test_flush_of_an_empty_window_does_nothing():
    run = training(2, adam)
    before = bits(run.updates)
    assert run.updates.flush() is False
    run.call(1)
    run.call(3)
    after = bits(run.updates)
    assert after != before
    assert run.updates.flush() is False
    assert bits(run.updates) == after


def test_second_flush_does_nothing():
    run = training(3, adam)
    run.call(1)
    assert run.updates.flush() is True
    after = bits(run.updates)
    assert run.updates.flush() is False
    assert bits(run.updates) == after


def test_flush_leaves_an_empty_window(gate):
    run = training(3, gate=gate)
    run.call(100)
    run.updates.flush()
    assert_empty(run.updates)
    updated = [run.call(g) for g in (1, 2, 3, 7)]
    assert updated == [False, False, True, False]
    assert run.value() == -92
    assert run.updates.flush() is True
    assert run.value() == -99


@every_rule
def test_flush_equals_the_rule_on_the_mean_of_the_rest(name, floatX):
    value = np.array([1.0, -2.0])
    params = [shared(value, dtype=floatX)]
    run = training(3, RULES[name], params, **hyper(name))
    rule, defaults = reference.RULES[name]
    window = reference.Window(
        [value], rule, 3, **dict(defaults, **hyper(name))
    )

    for call in range(5):
        grad = [1.0 + call, 2.0]
        run.call(grad)
        window.call([np.array(grad)])
    assert run.updates.flush() is window.flush() is True
    assert_close(values(params), [value], floatX)


def test_flush_calls_the_rule_no_second_time():
    calls = []

    def rule(grads, params):
        calls.append(grads)
        return adam(grads, params)

    run = training(2, rule)
    for g in (1, 2, 3):
        run.call(g)
    run.updates.flush()
    assert len(calls) == 1


def test_flush_keeps_the_rest_of_the_dictionary():
    w, calls = shared(10, "w"), shared(0)
    updates = with_accumulated_gradients(3 * w, [w], 2, sgd)
    updates[calls] = calls + 1
    train = theano.function([], updates=updates)
    train()
    updates.flush()
    assert (float(w.get_value()), float(calls.get_value())) == (7, 1)


@theano_only
@pytest.mark.parametrize("name", ["rate", None])
def test_flush_refuses_a_rule_that_needs_an_input(name):
    w, rate = shared(10, "w"), T.dscalar(name)
    updates = with_accumulated_gradients(
        w, [w], 2, rules.sgd, learning_rate=rate
    )
    train = theano.function([rate], updates=updates)
    assert updates.flush() is False
    train(2)
    before = bits(updates)
    with refusal(
        ValueError,
        "`flush` must find all that the update rule needs in shared "
        "variables, got the function input "
        f"{name or '<TensorType(float64, scalar)>'}. Hold it in a shared "
        "variable.",
    ):
        updates.flush()
    assert bits(updates) == before


def test_rule_may_use_an_input_of_the_function(gate):
    w, rate = shared(10, "w"), T.dscalar("rate")
    updates = with_accumulated_gradients(
        w, [w], 2, rules.sgd, gate=gate, learning_rate=rate
    )
    train = theano.function([rate], updates=updates)
    train(100)
    train(2)
    assert w.get_value() == 8


def test_reset_forgets_what_was_collected_and_no_more():
    run = training(2, adam)
    for g in (1, 2, 100):
        run.call(g)
    before = bits(run.variables)
    run.updates.reset()
    assert_empty(run.updates)
    assert bits(run.variables) == before
    assert [run.call(g) for g in (1, 2)] == [False, True]


# ---------------------------------------------------------------- `updated`


def test_updated_tells_when_parameters_change(gate):
    run = training(2, gate=gate, weight=WEIGHT, skip_nonfinite=True)
    for g, weight, expected in [
        (1, 1, False),
        (nan, 1, False),  # skipped
        (3, 1, True),
        (5, 0, False),
        (5, 0, False),  # a window of no weight
        (nan, 0, False),
        (2, 1, True),
        (2, 1, False),
        (inf, 1, False),  # skipped
        (2, nan, False),  # skipped
        (2, 0, True),  # applies the gradient before
        (2, 1, False),
    ]:
        before = run.value()
        assert run.call(g, weight) is expected
        assert (run.value() != before) is expected


def test_updated_starts_again_after_a_flush():
    run = training(3)
    updated = [run.call(1), run.call(1)]
    run.updates.flush()
    updated += [run.call(1), run.call(1), run.call(1)]
    assert updated == [False] * 4 + [True]


# ------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nonfinite_gradients_reach_parameters_at_their_boundary(bad, gate):
    run = training(2, gate=gate)
    run.call(bad)
    assert run.value() == 10
    run.call(1)
    assert not np.isfinite(run.value())


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_window_is_clean_after_nonfinite_gradients(bad, gate):
    run = training(2, gate=gate)
    run.call(bad)
    run.call(bad)
    assert_empty(run.updates)
    run.w.set_value(10)
    run.call(1)
    run.call(3)
    assert run.value() == 8


def test_flush_and_reset_clear_nonfinite_gradients():
    run = training(3)
    run.call(nan)
    run.updates.reset()
    assert_empty(run.updates)
    run.call(nan)
    run.updates.flush()
    assert_empty(run.updates)
    assert np.isnan(run.value())


def test_nan_in_one_parameter_stays_there():
    params = [shared(1), shared([2, 3])]
    run = training(2, params=params)
    run.call(nan, [1, nan])
    run.call(1, [3, 1])
    assert_array_equal(params[0].get_value(), nan)
    assert_array_equal(params[1].get_value(), [0, nan])


def with_bad_calls(run, bad_calls):
    """Train with and without bad calls; return the bits of either."""
    variables = [*run.variables, *window(run.updates)]
    before, trained = values(variables), []
    for bad in ([], *bad_calls):
        restore(variables, before)
        updated = []
        for call in range(7):
            if bad:
                assert run.call(*bad) is False
            updated.append(run.call(1.5 + call, [2, 0.1 * call]))
        trained.append((updated, bits(variables)))
    return trained


@every_rule
def test_skipped_calls_leave_no_bit(name, gate):
    params = [shared(10, "w"), shared([1, 2])]
    run = training(
        3,
        RULES[name],
        params,
        gate=gate,
        skip_nonfinite=True,
        learning_rate=0.5,
    )
    bad_calls = [(nan, [1, 2]), (1, [2, inf]), (-inf, [nan, nan])]
    plain, *skipped = with_bad_calls(run, bad_calls)
    assert skipped == [plain] * 3
    assert plain[0] == [False, False, True] * 2 + [False]


def test_skipping_changes_no_bit_of_good_windows(gate):
    trained = []
    for skip in (False, True):
        params = [shared(10, "w"), shared([1, 2])]
        run = training(3, adam, params, gate=gate, skip_nonfinite=skip)
        trained += with_bad_calls(run, [])
    assert trained[0] == trained[1]


def test_skipped_calls_are_counted(gate):
    run = training(2, gate=gate, skip_nonfinite=True)
    counts = []
    for g in (1, nan, inf, 3, -inf):
        run.call(g)
        counts.append(run.updates.skipped)
    assert counts == [0, 1, 2, 2, 3]
    assert run.value() == 8
    run.updates.reset()
    assert run.updates.skipped == 3


@pytest.mark.parametrize("N", [1, 2])
def test_nothing_is_skipped_unless_asked_for(N):
    run = training(N)
    run.call(nan)
    assert run.updates.skipped == 0


@pytest.mark.parametrize("context", ["cpu", None])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(context):
    total = SimpleNamespace(type=SimpleNamespace(context_name=context))
    grad = T.dmatrix()
    is_finite = theano.function(
        [grad], _backend.of(grad).is_finite(grad, total)
    )
    assert is_finite(np.full((3, 50), 1e308))
    assert is_finite(np.zeros((0, 3)))
    for bad in (nan, inf, -inf):
        grads = np.full((3, 50), -1e308)
        grads[2, 49] = bad
        assert not is_finite(grads)


def test_skipped_call_is_no_boundary(gate):
    N = theano.shared(3)
    run = training(N, gate=gate, skip_nonfinite=True)
    calls = [run.call(1), run.call(3)]
    N.set_value(2)
    assert [*calls, run.call(nan), run.call(5)] == [False] * 3 + [True]
    assert run.value() == 7


def test_flush_after_nothing_but_skipped_calls_does_nothing():
    run = training(3, adam, skip_nonfinite=True)
    before = bits(run.variables)
    run.call(nan)
    assert run.updates.flush() is False
    assert bits(run.variables) == before


def test_window_of_one_can_skip(gate):
    run = training(1, adam, gate=gate, skip_nonfinite=True)
    assert (run.updates.counter, run.updates.accumulators) == (None, [])
    assert run.call(1) is True
    before = bits(run.variables)
    assert run.call(nan) is False
    assert bits(run.variables) == before
    assert run.updates.skipped == 1
    assert run.call(1) is True
    assert bits(run.variables) != before
    assert run.updates.flush() is False


def test_gradient_too_large_for_the_accumulator_is_skipped():
    w, g = shared(10, "w", "float32"), T.dscalar()
    updates = with_accumulated_gradients([g], [w], 2, sgd, skip_nonfinite=True)
    train = theano.function([g], updates=updates)
    for grad in (1, 1e300, 3):
        train(grad)
    assert (w.get_value(), updates.skipped) == (8, 1)


# ----------------------------------------------------------------- weights


def test_weights_make_a_weighted_mean(gate):
    run = training(2, gate=gate, weight=WEIGHT)
    run.call(2, 1)
    run.call(6, 3)
    assert run.value() == 5


@pytest.mark.parametrize("weight", [3, 0.25, np.float32(2)])
def test_equal_weights_are_no_weights(weight):
    run = training(2, weight=weight)
    run.call(2)
    run.call(6)
    assert run.value() == 6


@every_rule
def test_unequal_micro_batches_equal_the_whole_batch(name, floatX):
    params, (x, y), loss = regression(floatX)
    updates = with_accumulated_gradients(
        loss, params, 3, RULES[name], weight=x.shape[0], **hyper(name)
    )
    train = theano.function([x, y], updates=updates)
    whole = RULES[name](loss, params, **hyper(name))
    train_whole = theano.function([x, y], updates=whole)

    rng = np.random.RandomState(0)
    X = rng.uniform(0.5, 1.5, (2, 8, 3)).astype(floatX)
    Y = rng.uniform(2, 3, (2, 8, 2)).astype(floatX)
    for batch in range(2):
        for piece in (slice(0, 1), slice(1, 6), slice(6, 8)):
            train(X[batch][piece], Y[batch][piece])
    trained = values(v for v in updates if v in params)
    restore(params, start(floatX))
    for batch in range(2):
        train_whole(X[batch], Y[batch])
    assert_close(trained, values(v for v in updates if v in params), floatX)


def test_penalty_is_counted_once_whatever_the_weights():
    w, x = shared(4, "w"), T.dvector()
    loss = (w * x).mean() + 0.25 * w**2
    updates = with_accumulated_gradients(loss, [w], 2, sgd, weight=x.shape[0])
    train = theano.function([x], updates=updates)
    train([1])
    train([2, 3, 2])
    assert w.get_value() == 4 - (2 + 0.5 * 4)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_zero_weight_adds_nothing_and_counts(skip_nonfinite, gate):
    run = training(3, gate=gate, weight=WEIGHT, skip_nonfinite=skip_nonfinite)
    assert [run.call(*call) for call in [(2, 1), (nan, 0), (6, 3)]] == [
        False,
        False,
        True,
    ]
    assert run.value() == 5
    assert run.updates.skipped == 0


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_window_of_no_weight_changes_nothing(N, skip_nonfinite, gate):
    run = training(
        N, adam, gate=gate, weight=WEIGHT, skip_nonfinite=skip_nonfinite
    )
    before = bits(run.variables)
    assert [run.call(g, 0) for g in (5, nan)] == [False, False]
    assert bits(run.variables) == before
    assert run.updates.counter is None or not run.updates.counter.get_value()
    for g in (1, 3):
        run.call(g, 1)
    assert bits(run.variables) != before
    assert np.isfinite(run.value())


def test_weight_starts_again_with_each_window(gate):
    run = training(2, gate=gate, weight=WEIGHT)
    for g, weight in [(2, 1), (2, 1), (2, 1), (6, 3)]:
        run.call(g, weight)
    assert run.value() == 10 - 2 - 5


def test_flush_divides_by_the_weight_collected():
    run = training(3, weight=WEIGHT)
    run.call(2, 1)
    run.call(6, 3)
    assert run.updates.flush() is True
    assert run.value() == 5
    for g in (1, 2, 3):
        run.call(g, 1)
    assert run.value() == 3


def test_flush_of_no_weight_empties_the_window():
    run = training(3, adam, weight=WEIGHT)
    before = bits(run.updates)
    run.call(5, 0)
    assert run.updates.flush() is False
    assert bits(run.updates) == before


def test_reset_forgets_the_weight():
    run = training(2, weight=WEIGHT)
    run.call(7, 5)
    run.updates.reset()
    run.call(2, 1)
    run.call(6, 3)
    assert run.value() == 5


@pytest.mark.parametrize("weight", [-1, nan, inf, -inf])
def test_impossible_weight_reaches_parameters_as_nan(weight, gate):
    run = training(2, gate=gate, weight=WEIGHT)
    run.call(1, weight)
    assert run.value() == 10
    assert run.call(1, 1) is True
    assert np.isnan(run.value())
    run.w.set_value(10)
    run.call(2, 1)
    run.call(6, 3)
    assert run.value() == 5


@pytest.mark.parametrize("weight", [-1, nan, inf, -inf])
def test_impossible_weight_is_skipped_if_asked_for(weight, gate):
    run = training(2, gate=gate, weight=WEIGHT, skip_nonfinite=True)
    calls = [(2, 1), (1, weight), (6, 3)]
    assert [run.call(*call) for call in calls] == [False, False, True]
    assert (run.value(), run.updates.skipped) == (5, 1)


# What float16 and float32 can't hold, and what only their sum can't.
OUT_OF_RANGE = [
    ("float32", [1e40]),
    ("float32", [1e-50]),
    ("float32", [1e-40]),
    ("float32", [3e38, 3e38]),
    ("float16", [40000, 40000]),
    ("float16", [1e-5]),
]


@pytest.mark.parametrize(("dtype", "weights"), OUT_OF_RANGE)
@pytest.mark.parametrize("N", [1, 2])
def test_weight_out_of_range_is_as_an_impossible_one(N, dtype, weights, gate):
    N = max(N, len(weights))
    run = training(
        N,
        half_sgd,
        [shared(0.5, "w", dtype)],
        gate=gate,
        weight=WEIGHT,
        accumulator_dtype=dtype,
    )
    for weight in [1, *weights][-N:]:
        run.call(0.5, weight)
    assert np.isnan(run.value())
    run.w.set_value(np.array(0.5, dtype))
    for _ in range(N):
        run.call(0.5, 16)
    assert run.value() == 0


@pytest.mark.parametrize(("dtype", "weights"), OUT_OF_RANGE)
def test_weight_out_of_range_is_skipped_if_asked_for(dtype, weights, gate):
    run = training(
        2,
        half_sgd,
        [shared(0.5, "w", dtype)],
        gate=gate,
        weight=WEIGHT,
        skip_nonfinite=True,
        accumulator_dtype=dtype,
    )
    calls = [*weights, 16, 16]
    assert [run.call(0.5, weight) for weight in calls][-2:] == (
        [True, False] if len(weights) == 2 else [False, True]
    )
    assert (run.value(), run.updates.skipped) == (0, 1)


@pytest.mark.parametrize("weight", [2.0**-14, 32752.0])
def test_weight_at_the_limit_of_its_dtype_is_taken(weight, gate):
    run = training(
        2,
        half_sgd,
        [shared(0.5, "w", "float16")],
        gate=gate,
        weight=weight,
        accumulator_dtype="float16",
    )
    for _ in range(2):
        run.call(0.5)
    assert run.value() == 0


def test_limits_of_weights_are_those_of_the_narrowest_accumulator():
    params = [shared(0, "v", "float64"), shared(0, "w", "float32")]
    run = training(2, params=params, weight=WEIGHT)
    run.call(1, 1, 1)
    run.call(1, 1, 1e40)
    assert np.isnan([param.get_value() for param in params]).all()


def test_window_of_one_can_have_weights(gate):
    run = training(1, gate=gate, weight=WEIGHT)
    assert (run.updates.counter, run.updates.accumulators) == (None, [])
    assert [run.call(2, 4), run.call(7, 0), run.call(1, 0.5)] == [
        True,
        False,
        True,
    ]
    assert run.value() == 7


# ------------------------------------------------- windows that change size


def test_shared_N_may_change_between_windows(gate):
    N = theano.shared(2)
    run = training(N, gate=gate)
    updated = [run.call(g) for g in (1, 3)]
    N.set_value(3)
    updated += [run.call(g) for g in (1, 2, 3)]
    N.set_value(1)
    updated += [run.call(5)]
    assert updated == [False, True, False, False, True, True]
    assert run.value() == 10 - 2 - 2 - 5


def test_shrinking_N_applies_at_the_next_call_all_that_was_collected(gate):
    N = theano.shared(4)
    run = training(N, gate=gate)
    for g in (1, 2, 3):
        assert run.call(g) is False
    N.set_value(2)
    assert run.call(6) is True
    assert run.value() == 7
    assert [run.call(g) for g in (1, 3)] == [False, True]
    assert run.value() == 5


def test_growing_N_lengthens_the_window(gate):
    N = theano.shared(np.int8(2))
    run = training(N, gate=gate)
    run.call(1)
    N.set_value(3)
    assert [run.call(g) for g in (2, 6)] == [False, True]
    assert run.value() == 7


def test_N_may_be_an_input_of_the_function():
    w, g, N = shared(10, "w"), T.dscalar(), T.iscalar("N")
    updates = with_accumulated_gradients(w * g, [w], N, sgd)
    train = theano.function([g, N], updates.updated, updates=updates)
    calls = [(1, 2), (3, 2), (1, 3), (3, 2), (5, 2)]
    updated = [bool(train(*call)) for call in calls]
    assert updated == [False, True, False, True, False]
    assert w.get_value() == 6
    assert updates.flush() is True
    assert w.get_value() == 1


# --------------------------------------------- kinds of parameter and dtype


@pytest.mark.parametrize(
    ("shape", "broadcastable"),
    [
        ((), ()),
        ((1, 3), (True, False)),
        ((3, 1), (False, True)),
        ((1, 1), (True, True)),
        ((0,), (False,)),
        ((0, 2), (False, False)),
        ((2, 1, 3, 1), (False, True, False, True)),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": True, "weight": 2}]
)
def test_parameters_may_be_of_any_shape(shape, broadcastable, options, gate):
    value = np.ones(shape)
    param = shared(value, broadcastable=broadcastable)
    run = training(
        3,
        RULES["momentum"],
        [param],
        gate=gate,
        **hyper("momentum"),
        **options,
    )
    rule, _ = reference.RULES["momentum"]
    window = reference.Window([value], rule, 3, **hyper("momentum"))

    for call in range(4):
        grad = np.full(shape, 1.0 + call)
        run.call(grad)
        window.call([grad])
    assert run.updates.flush() is window.flush() is True
    assert param.get_value().shape == shape
    assert_allclose(param.get_value(), value, rtol=TOLERANCE["float64"])


def test_half_precision_is_summed_in_single(gate):
    run = training(4, half_sgd, [shared(0, "w", "float16")], gate=gate)
    assert run.updates.accumulators[0].dtype == "float32"
    for g in (2048, 1, 1, 2):  # 2048 + 1 is 2048 in float16
        run.call(g)
    assert run.w.get_value() == -513
    assert run.w.get_value().dtype == "float16"


def test_state_of_half_precision_rules_stays_so():
    rule = functools.partial(
        rules.momentum,
        learning_rate=np.float16(1),
        momentum=np.float16(0.5),
    )
    run = training(2, rule, [shared([0, 0], "w", "float16")])
    for g in (1, 3, 1, 3):
        run.call([g, -g])
    assert_array_equal(run.w.get_value(), [-5, 5])
    assert [v.get_value().dtype for v in run.variables] == ["float16"] * 2


@pytest.mark.parametrize(
    ("param_dtype", "dtype", "grads", "mean"),
    [
        # float32 has steps of 4 at 2**25, float16 steps of 2 at 2048.
        ("float32", None, (2**25, 1.5, -(2**25)), 0),
        ("float32", "float32", (2**25, 1.5, -(2**25)), 0),
        ("float32", "float64", (2**25, 1.5, -(2**25)), 0.5),
        ("float64", None, (2**25, 1.5, -(2**25)), 0.5),
        ("float64", "float32", (2**25, 1.5, -(2**25)), 0),
        ("float16", "float64", (2048, 1.5, -2048), 0.5),
        ("float32", "float16", (2048, 1, -2048), 0),
    ],
)
def test_sums_have_the_dtype_asked_for(param_dtype, dtype, grads, mean, gate):
    w = shared([0], "w", param_dtype)
    run = training(3, half_sgd, [w], accumulator_dtype=dtype, gate=gate)
    assert run.updates.accumulators[0].dtype == (dtype or param_dtype)
    for g in grads:
        run.call([g])
    assert w.get_value() == -mean
    assert w.get_value().dtype == param_dtype


@pytest.mark.parametrize(
    ("dtype", "accumulator_dtype"), [("float16", None), ("float32", "float64")]
)
def test_mean_of_4096_equal_terms_is_that_term(dtype, accumulator_dtype):
    # Their sum needs 12 bits more than they have, at most.
    term = np.random.RandomState(0).randn(100).astype(dtype)
    w = shared(np.zeros(100), "w", dtype)
    run = training(4096, half_sgd, [w], accumulator_dtype=accumulator_dtype)
    for _ in range(4096):
        run.call(term)
    assert_array_equal(w.get_value(), -term)


def test_dtype_object_is_taken_as_accumulator_dtype():
    dtype = np.dtype("float32")
    run = training(2, accumulator_dtype=dtype)
    assert run.updates.accumulators[0].dtype == "float32"


@pytest.mark.parametrize(("N", "weight"), [(2, None), (2, 2), (1, 2)])
def test_rule_gets_gradients_of_the_dtype_of_the_parameter(N, weight):
    dtypes = []

    def rule(grads, params):
        dtypes.extend(grad.dtype for grad in grads)
        return half_sgd(grads, params)

    params = [shared(1, "v", "float16"), shared(1, "w", "float32")]
    grads = [T.fscalar(), T.dscalar()]
    updates = with_accumulated_gradients(grads, params, N, rule, weight=weight)
    train = theano.function(grads, updates=updates)
    train(1, 0.5)
    train(3, 0.5)
    assert dtypes == ["float16", "float32"]
    assert [p.get_value() for p in params] == {1: [-3, 0], 2: [-1, 0.5]}[N]


def test_gradient_may_be_broadcast_to_its_parameter(gate):
    w, g = shared([[1, 2], [3, 4]]), T.drow()
    updates = with_accumulated_gradients([g], [w], 2, sgd, gate=gate)
    train = theano.function([g], updates=updates)
    train([[1, 2]])
    train([[3, 0]])
    assert_array_equal(w.get_value(), [[-1, 1], [1, 3]])


@pytest.mark.parametrize("kind", [list, tuple])
def test_gradients_may_be_given_in_place_of_a_loss(kind, gate):
    params = [shared(10, "v"), shared(20, "w")]
    grads = [T.dscalar(), T.dscalar()]
    updates = with_accumulated_gradients(
        kind(grads), kind(params), 2, sgd, gate=gate
    )
    train = theano.function(grads, updates=updates)
    train(1, 10)
    train(3, 10)
    assert [p.get_value() for p in params] == [8, 10]


def test_gradient_may_be_a_constant():
    w = shared(10, "w")
    updates = with_accumulated_gradients([np.array(2.0)], [w], 2, sgd)
    train = theano.function([], updates=updates)
    train()
    train()
    assert w.get_value() == 8


@theano_only
def test_sparse_gradients_of_an_embedding_are_accumulated(gate):
    table, rows = shared(np.zeros((4, 2)), "table"), T.lvector()
    loss = (theano.sparse_grad(table[rows]) * [[1, 2]]).sum()
    updates = with_accumulated_gradients(loss, [table], 2, sgd, gate=gate)
    train = theano.function([rows], updates=updates)
    train([0, 2])
    assert_array_equal(table.get_value(), np.zeros((4, 2)))
    train([2, 2])
    assert_array_equal(
        table.get_value(), [[-0.5, -1], [0, 0], [-1.5, -3], [0, 0]]
    )


@theano_only
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": True, "weight": 2}]
)
def test_test_values_are_computed_while_building(options, gate, monkeypatch):
    monkeypatch.setattr(theano.config, "compute_test_value", "raise")
    # Each operation would be compiled by itself.
    monkeypatch.setattr(theano.config, "cxx", "")
    w, x = shared([10, 10], "w"), T.dmatrix()
    x.tag.test_value = np.ones((3, 2))
    updates = with_accumulated_gradients(
        (w * x).sum(), [w], 2, adam, gate=gate, **options
    )
    train = theano.function([x], updates=updates)
    train(np.ones((1, 2)))
    assert updates.flush() is True


# -------------------------------------------------------- how it is called


def test_rule_gets_lists_and_its_own_keywords():
    got = []

    def rule(grads, params, **kw):
        got.append((type(grads), len(grads), params, kw))
        return sgd(grads, params)

    params = (shared(1, "v"), shared(2, "w"))
    loss = params[0] * params[1]
    with_accumulated_gradients(loss, params, 2, rule, momentum=0.5)
    assert got == [(list, 2, list(params), {"momentum": 0.5})]


def test_rule_may_return_pairs():
    def rule(grads, params):
        return [(p, p - g) for p, g in zip(params, grads)]

    run = training(2, rule)
    run.call(1)
    run.call(3)
    assert run.value() == 8


def test_rule_may_set_a_variable_to_a_number():
    done = shared(0, "done")

    def rule(grads, params):
        return {**sgd(grads, params), done: np.array(1.0)}

    run = training(2, rule)
    run.call(1)
    assert done.get_value() == 0
    run.call(1)
    assert done.get_value() == 1


def noisy_sgd(grads, params):
    """Add noise of a stream that moves with the rule alone."""
    streams = NumpyStreams(1)
    noise = streams.normal((), dtype="float64")
    grads = rules.get_or_compute_grads(grads, params)
    updates = sgd([grad + noise for grad in grads], params)
    updates.update(streams.updates())
    return updates


@not_theano_pymc
def test_lazy_gate_holds_back_the_random_stream_of_a_rule():
    run, plain = (training(N, noisy_sgd, gate="lazy") for N in (2, 1))
    for g in (1, 3, 4, 6):
        run.call(g)
    for g in (2, 5):
        plain.call(g)
    assert run.value() == plain.value()


@theano_only
@not_theano_pymc
@pytest.mark.parametrize(
    "options", [{"gate": "switch"}, {"gate": "lazy", "weight": 2}]
)
def test_switch_refuses_the_random_stream_of_a_rule(options):
    with refusal(
        ValueError,
        '`gate` must be "lazy", and `weight` left out, for a rule that '
        "updates more than tensors, got <RandomStateType>. Pass them so, or "
        "take lasagne_accum.function.",
    ):
        training(2, noisy_sgd, **options)


def test_accumulated_rule_called_without_a_loss_waits_for_it():
    w = shared(10, "w")
    rule = accumulated(rules.sgd, 2)(learning_rate=0.5)
    updates = rule(2 * w, [w])
    train = theano.function([], updates=updates)
    path = []
    for _ in range(4):
        train()
        path.append(w.get_value())
    assert path == [10, 9, 9, 8]
    with pytest.raises(TypeError, match="params"):
        rule(2 * w)


def test_accumulated_rule_takes_the_arguments_of_its_rule():
    w = shared(10, "w")
    rule = accumulated(rules.momentum, 2)
    updates = rule(2 * w, [w], 0.5, momentum=0.75)
    train = theano.function([], updates=updates)
    path = []
    for _ in range(4):  # velocities are -1, then -0.75 - 1
        train()
        path.append(float(w.get_value()))
    assert path == [10, 9, 9, 7.25]


def test_accumulated_rule_is_named_as_its_rule():
    rule = accumulated(rules.adam, 2)
    assert rule.__name__ == "adam"
    assert rule.__doc__ == rules.adam.__doc__


def test_accumulated_rule_may_be_a_partial():
    w = shared(10, "w")
    rule = accumulated(sgd, 2)
    train = theano.function([], updates=rule(2 * w, [w]))
    train()
    train()
    assert w.get_value() == 8


def test_accumulated_rule_may_be_used_twice():
    v, w = shared(10, "v"), shared(10, "w")
    rule = accumulated(sgd, 2)
    updates = [rule(2 * v, [v]), rule(w, [w])]
    train = theano.function([], updates=updates[0])
    train()
    train()
    assert (float(v.get_value()), float(w.get_value())) == (8, 10)
    assert not updates[1].counter.get_value()


def test_accumulated_rule_is_weighted():
    w, x = shared(10, "w"), T.dvector()
    rule = accumulated(sgd, 2, weight=x.shape[0])
    train = theano.function([x], updates=rule((w * x).mean(), [w]))
    train([2])
    train([6, 6, 6])
    assert w.get_value() == 5


def test_accumulated_rule_skips():
    w = shared(10, "w")
    updates = accumulated(sgd, 2, skip_nonfinite=True)(w * nan, [w])
    theano.function([], updates=updates)()
    assert updates.skipped == 1


def test_accumulated_rule_has_the_accumulator_dtype():
    w = shared(10, "w")
    updates = accumulated(sgd, 2, accumulator_dtype="float32")(w, [w])
    assert updates.accumulators[0].dtype == "float32"


@pytest.mark.parametrize(("gate", "lazy"), [("switch", 0), ("lazy", 1)])
def test_accumulated_rule_has_the_gate(gate, lazy):
    w = shared(10, "w")
    train = theano.function([], updates=accumulated(sgd, 2, gate=gate)(w, [w]))
    ops = [str(node.op) for node in train.maker.fgraph.apply_nodes]
    assert sum("if{" in op for op in ops) == lazy


@pytest.mark.parametrize("copied", [OrderedDict.copy, copy.copy, OrderedDict])
def test_copy_is_a_plain_dictionary(copied):
    w = shared(10, "w")
    updates = with_accumulated_gradients(w, [w], 2, sgd)
    plain = updates.copy() if copied is OrderedDict.copy else copied(updates)
    assert type(plain) is OrderedDict
    assert list(plain.items()) == list(updates.items())
    plain.clear()
    assert w in updates


@pytest.mark.skipif(sys.version_info < (3, 9), reason="dicts have no | yet")
def test_union_is_a_plain_dictionary():
    w, calls = shared(10, "w"), shared(0)
    updates = with_accumulated_gradients(w, [w], 2, sgd)
    for union in (updates | {calls: calls + 1}, {calls: calls + 1} | updates):
        assert type(union) is OrderedDict
        assert set(union) == {*updates, calls}


# --------------------------------------------------- the two-function form


def test_two_functions_collect_and_apply():
    run = two_functions()
    for g in (1, 2, 6):
        run.call(g)
        assert run.value() == 10
    assert run.apply() == [3]
    assert run.value() == 7
    run.call(4)
    assert run.apply() == [4]
    assert run.value() == 3


def test_mean_of_an_empty_window_is_zero():
    run = two_functions()
    assert run.apply() == [0]
    run.call(1)
    run.apply()
    assert run.apply() == [0]
    assert run.value() == 9


def test_reset_empties_all_that_accumulate_fills():
    run = two_functions(weight=WEIGHT)
    assert set(run.reset) == set(run.accumulate)
    run.call(nan, 3)
    run.apply()
    assert [v.get_value() for v in run.reset] == [0] * 3
    run.w.set_value(10)
    run.call(2, 1)
    run.call(6, 3)
    assert run.apply() == [5]


def test_two_functions_ignore_calls_of_no_weight():
    run = two_functions(weight=WEIGHT)
    run.call(nan, 0)
    assert run.apply() == [0]
    run.call(2, 1)
    run.call(nan, 0)
    assert run.apply() == [2]


def test_two_functions_skip_and_count():
    run = two_functions(skip_nonfinite=True)
    for g in (1, nan, inf, 3):
        run.call(g)
    (skipped,) = set(run.accumulate) - set(run.reset)
    assert (skipped.name, int(skipped.get_value())) == ("window_skipped", 2)
    assert run.apply() == [2]


def test_two_functions_sum_in_the_dtype_asked_for():
    w = shared(0, "w", "float32")
    run = two_functions(params=[w], accumulator_dtype="float64")
    for g in (2**25, 1.5, -(2**25)):
        run.call(g)
    (mean,) = run.apply()
    assert (mean, mean.dtype) == (0.5, "float32")


def test_counter_of_two_functions_takes_any_number_of_calls():
    run = two_functions()
    dtypes = {v.name: v.dtype for v in run.accumulate}
    assert dtypes == {"w_accumulator": "float64", "window_counter": "int64"}


@theano_only
def test_two_functions_sum_sparse_gradients():
    table, rows = shared(np.zeros((3, 2)), "table"), T.lvector()
    loss = theano.sparse_grad(table[rows]).sum()
    accumulate, (mean,), _ = accumulate_gradients(loss, [table])
    train = theano.function([rows], updates=accumulate)
    train([0, 2])
    train([2, 2])
    assert_array_equal(mean.eval(), [[0.5, 0.5], [0, 0], [1.5, 1.5]])


# ------------------------------------------------------------ what is refused


def build(N=2, update_fn=sgd, **options):
    w = shared(1, "w")
    return with_accumulated_gradients(w**2, [w], N, update_fn, **options)


@theano_only
@pytest.mark.parametrize(
    ("N", "error", "got"),
    [
        (0, ValueError, "0"),
        (-2, ValueError, "-2"),
        (np.int64(0), ValueError, "0"),
        (np.int8(-1), ValueError, "-1"),
        (1.5, TypeError, "1.5"),
        (2.0, TypeError, "2.0"),
        (nan, TypeError, "nan"),
        (None, TypeError, "None"),
        ("4", TypeError, "'4'"),
        (True, TypeError, "True"),
        (False, TypeError, "False"),
        (np.bool_(True), TypeError, "True"),
        ([4], TypeError, "[4]"),
        (T.dscalar(), TypeError, "TensorType(float64, scalar)"),
        (T.lvector(), TypeError, "TensorType(int64, vector)"),
    ],
)
def test_wrong_N_is_refused(N, error, got):
    with refusal(
        error,
        f"`N` must be a positive integer, got {got}. Pass 1 to apply every "
        "update.",
    ):
        build(N)


def test_N_beyond_all_counters_is_refused():
    build(2**63 - 1)
    with refusal(
        ValueError,
        f"`N` must be at most 2**63 - 1, got {2**63}. Pass that for windows "
        "that `flush` alone completes.",
    ):
        build(2**63)


@pytest.mark.parametrize("gate", ["Lazy", None, True])
def test_unknown_gate_is_refused(gate):
    with refusal(
        ValueError,
        f'`gate` must be "switch" or "lazy", got {gate!r}. Leave it out for '
        '"switch", which works everywhere.',
    ):
        build(gate=gate)


@pytest.mark.parametrize("dtype", ["int32", "half", np.float32, 64])
def test_unknown_accumulator_dtype_is_refused(dtype):
    with refusal(
        ValueError,
        "`accumulator_dtype` must be float16, float32 or float64, got "
        f"{dtype!r}. Leave it out for the parameters' own.",
    ):
        build(accumulator_dtype=dtype)


@theano_only
@pytest.mark.parametrize(
    ("weight", "error", "got"),
    [
        (-1, ValueError, "-1"),
        (nan, ValueError, "nan"),
        (inf, ValueError, "inf"),
        (np.float32(-0.5), ValueError, "-0.5"),
        ("2", TypeError, "'2'"),
        ([1], TypeError, "[1]"),
        (1j, TypeError, "1j"),
        (T.dvector(), TypeError, "TensorType(float64, vector)"),
    ],
)
@pytest.mark.parametrize("N", [1, 2])
def test_wrong_weight_is_refused(N, weight, error, got):
    with refusal(
        error,
        "`weight` must be a finite number from 0 up or a symbolic scalar, "
        f"got {got}. Pass the number of samples in the call, or leave it out "
        "for equal weights.",
    ):
        build(N, weight=weight)


@pytest.mark.parametrize(
    ("dtype", "weight", "limits"),
    [
        ("float16", 70000, "6.1e-05 to 6.55e+04"),
        ("float32", 1e40, "1.18e-38 to 3.4e+38"),
        ("float32", 1e-50, "1.18e-38 to 3.4e+38"),
        pytest.param("float64", 10**400, "2.23e-308 to 1.8e+308", id="huge"),
    ],
)
@pytest.mark.parametrize("N", [1, 2])
def test_weight_that_accumulators_cannot_hold_is_refused(
    N, dtype, weight, limits
):
    with refusal(
        ValueError,
        f"`weight` must be 0 or from {limits} in the accumulators' dtypes, "
        f'got {weight!r}. Scale it, or pass accumulator_dtype="float64".',
    ):
        build(N, weight=weight, accumulator_dtype=dtype)


@theano_only
@pytest.mark.parametrize(
    "form",
    [
        lambda loss, params: with_accumulated_gradients(loss, params, 2, sgd),
        lambda loss, params: with_accumulated_gradients(loss, params, 1, sgd),
        lambda loss, params: accumulated(sgd, 2)(loss, params),
        accumulate_gradients,
    ],
)
@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (
            lambda w: w,
            TypeError,
            "`params` must be a list of shared variables, got the variable "
            "w. Pass [w].",
        ),
        (
            lambda w: [w, 2 * w],
            ValueError,
            "`params` must contain shared variables only, got "
            "Elemwise{mul,no_inplace}.0 as element 1. Pass the shared "
            "variables it is made of; lasagne.utils.collect_shared_vars "
            "finds them.",
        ),
        (
            lambda w: [3.5],
            ValueError,
            "`params` must contain shared variables only, got 3.5 as element "
            "0. Pass the shared variables it is made of; "
            "lasagne.utils.collect_shared_vars finds them.",
        ),
        (
            lambda w: [shared(1), w, shared(2), w],
            ValueError,
            "`params` must contain each variable once, got w as elements 1 "
            "and 3. Pass it once.",
        ),
        (
            lambda w: [w, theano.shared(scipy.sparse.eye(2, format="csr"))],
            TypeError,
            "`params` must be dense, got <Sparse[float64, csr]> of "
            "Sparse[float64, csr]. Pass a dense one, or the values of a "
            "theano.sparse.CSR.",
        ),
    ],
)
def test_wrong_params_are_refused(form, params, error, text):
    w = shared(1, "w")
    with refusal(error, text):
        form(w**2, params(w))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_gradients_is_refused(count):
    params, grads = [shared(1), shared(2)], [T.dscalar() for _ in range(count)]
    with refusal(
        ValueError,
        "`loss_or_grads` must have a gradient for each parameter, got "
        f"{count} for 2 parameters. Pass as many, in the same order.",
    ):
        with_accumulated_gradients(grads, params, 2, sgd)


@theano_only
@pytest.mark.parametrize(
    ("param", "grad", "types"),
    [
        (
            shared([1, 2], "b"),
            T.dmatrix(),
            "TensorType(float64, matrix) for b of TensorType(float64, vector)",
        ),
        (
            shared([1, 2], None),
            T.dscalar(),
            "TensorType(float64, scalar) for <TensorType(float64, vector)> "
            "of TensorType(float64, vector)",
        ),
        (
            shared([[1, 2]], "row", broadcastable=(True, False)),
            T.dmatrix(),
            "TensorType(float64, matrix) for row of TensorType(float64, row)",
        ),
    ],
)
def test_gradient_of_another_shape_is_refused(param, grad, types):
    with refusal(
        ValueError,
        "`loss_or_grads` must have gradients of the parameters' shapes, got "
        f"{types}. Pass them in the same order.",
    ):
        with_accumulated_gradients([grad], [param], 2, sgd)


@pytest.mark.parametrize("rule", [accumulated(sgd, 2), accumulate_gradients])
def test_parameter_without_a_part_in_the_loss_is_named(rule):
    # Not by the line of source that Theano quotes.
    used, unused = shared(1, "used"), shared(2, "_".join("abc"))
    with pytest.raises(theano.gradient.DisconnectedInputError):
        sgd(used**2, [used, unused])
    with pytest.raises(theano.gradient.DisconnectedInputError, match="a_b_c"):
        rule(used**2, [used, unused])


def test_loss_that_is_no_scalar_gives_the_error_of_lasagne():
    w = shared([1, 2], "w")
    errors = []
    for rule in (sgd, accumulated(sgd, 2), accumulate_gradients):
        with pytest.raises(TypeError) as raised:
            rule(w**2, [w])
        errors.append(str(raised.value))
    assert errors[0] == errors[1] == errors[2]


@theano_only
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize(
    ("variable", "update", "got"),
    [
        (
            shared(0, "t", "int8"),
            lambda t: t + 1.0,
            "TensorType(float32, scalar) for t of TensorType(int8, scalar)",
        ),
        (
            shared(0, "m", "float32"),
            lambda m: m + np.float64(0.1),
            "TensorType(float64, scalar) for m of TensorType(float32, scalar)",
        ),
        (
            shared([[0, 0]], "v"),
            lambda v: T.drow(),
            "TensorType(float64, row) for v of TensorType(float64, matrix)",
        ),
        (
            shared(0),
            lambda v: v.dimshuffle("x"),
            "TensorType(float64, (True,)) for <TensorType(float64, scalar)> "
            "of TensorType(float64, scalar)",
        ),
        (
            shared(0, "s"),
            lambda s: None,
            "None for s of TensorType(float64, scalar)",
        ),
    ],
)
def test_update_of_another_type_is_refused(N, variable, update, got):
    def rule(grads, params):
        return [*sgd(grads, params).items(), (variable, update(variable))]

    with refusal(
        TypeError,
        "`update_fn` must return updates of their variables' types, got "
        f"{got}. Cast it inside the rule, or set Theano's floatX to the "
        "parameters' dtype.",
    ):
        build(N, rule)


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize(
    "returned", [None, 3, "ab", ["ab"], [1], {"w": 2}, [(shared(0), 1, 2)]]
)
def test_rule_that_returns_no_updates_is_refused(N, returned):
    with refusal(
        TypeError,
        "`update_fn` must give shared variables their updates, in a "
        f"dictionary or list of pairs, got {returned!r}. See "
        "lasagne.updates for examples.",
    ):
        build(N, lambda grads, params: returned)


@theano_only
def test_learning_rate_of_a_wider_dtype_is_refused():
    w, rate = shared(1, "w", "float32"), shared(1, dtype="float64")
    with refusal(
        TypeError,
        "`update_fn` must return updates of their variables' types, got "
        "TensorType(float64, scalar) for w of TensorType(float32, scalar). "
        "Cast it inside the rule, or set Theano's floatX to the parameters' "
        "dtype.",
    ):
        with_accumulated_gradients(w**2, [w], 2, rules.sgd, learning_rate=rate)


def test_options_are_taken_by_keyword_only():
    w = shared(1, "w")
    with pytest.raises(TypeError, match="positional"):
        with_accumulated_gradients(w**2, [w], 2, sgd, None)


def test_refusing_changes_nothing():
    params = [shared(1, "w")]
    grads = [T.dscalar()]
    for N in (0, "4"):
        with pytest.raises((TypeError, ValueError)):
            with_accumulated_gradients(grads, params, N, sgd)
    assert (len(grads), len(params)) == (1, 1)
