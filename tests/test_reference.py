"""The reference itself, held against values worked out on paper."""

from math import inf, nan, sqrt

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from reference import RULES, Window, sgd

RTOL = 1e-14  # some tens of float64 roundings


def path(name, p, grads, **hyper):
    """Return the values that `name` takes a scalar through from `p`."""
    rule, defaults = RULES[name]
    hyper = dict(defaults, **hyper)
    param, state, values = np.array(p, "float64"), {}, []
    for g in grads:
        rule([param], [np.array(g, "float64")], state, **hyper)
        values.append(float(param))
    return values


def make_window(N, p=10.0, **options):
    """Return a window that subtracts mean gradients from a scalar."""
    param = np.array(p, options.pop("param_dtype", "float64"))
    return param, Window([param], sgd, N, learning_rate=1.0, **options)


def call(window, g, **kw):
    return window.call([np.array(g, "float64")], **kw)


# ----------------------------------------------------------------- the rules


def test_defaults_are_those_of_lasagne():
    ms = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    assert {name: hyper for name, (_, hyper) in RULES.items()} == {
        "sgd": {},
        "momentum": {"momentum": 0.9},
        "nesterov_momentum": {"momentum": 0.9},
        "adagrad": {"learning_rate": 1.0, "epsilon": 1e-6},
        "rmsprop": {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6},
        "adadelta": {"learning_rate": 1.0, "rho": 0.95, "epsilon": 1e-6},
        "adam": dict(ms, learning_rate=0.001),
        "adamax": dict(ms, learning_rate=0.002),
        "amsgrad": dict(ms, learning_rate=0.001),
    }


def test_sgd_subtracts_scaled_gradients():
    assert path("sgd", 1, [2, -4], learning_rate=0.25) == [0.5, 1.5]


def test_momentum_adds_velocity():
    # v = -1/2, then -1/4 - 1/2 = -3/4, then -3/8 + 1 = 5/8
    values = path("momentum", 1, [2, 2, -4], learning_rate=0.25, momentum=0.5)
    assert values == [1 / 2, -1 / 4, 3 / 8]


def test_nesterov_momentum_looks_one_step_ahead():
    # v as above; steps v/2 - g/4 = -3/4, then -3/8 - 1/2, then 5/16 + 1
    values = path(
        "nesterov_momentum", 1, [2, 2, -4], learning_rate=0.25, momentum=0.5
    )
    assert values == [1 / 4, -5 / 8, 11 / 16]


def test_adagrad_adds_epsilon_to_the_sum_of_squares():
    # r + epsilon = 9 + 7 = 16, then 18 + 7 = 25; steps 3/4, 3/5
    values = path("adagrad", 2, [3, 3], epsilon=7)
    assert_allclose(values, [5 / 4, 13 / 20], RTOL)


def test_rmsprop_adds_epsilon_to_the_mean_square():
    # r = 4/4 = 1, (3 + 1)/4 = 1, (3 + 49)/4 = 13; r + epsilon = 4, 4, 16
    # steps 2/2, 1/2, 7/4
    values = path("rmsprop", 4, [2, 1, 7], rho=0.75, epsilon=3)
    assert values == [3, 5 / 2, 3 / 4]


def test_adadelta_scales_by_the_unscaled_steps_before():
    # r as above; s + epsilon = 3, then 3/4 + 3 = 15/4,
    # then 9/16 + 15/64 + 3 = 243/64
    # steps 2 sqrt(3)/2, 1 sqrt(15/4)/2, 7 sqrt(243/64)/4, each times lr = 1/2
    values = path(
        "adadelta", 0, [2, 1, 7], learning_rate=0.5, rho=0.75, epsilon=3
    )
    steps = [sqrt(3) / 2, sqrt(15) / 8, 63 * sqrt(3) / 64]
    assert_allclose(values, -np.cumsum(steps), RTOL)


HALVES = {"learning_rate": 1, "beta1": 0.5, "beta2": 0.75, "epsilon": 1}


def test_adam_corrects_both_moments_in_its_step_size():
    # m = 1, 1, -1; v = 1, 1, 3
    # a_t = sqrt(1/4)/(1/2), sqrt(7/16)/(3/4), sqrt(37/64)/(7/8)
    #     = 1, sqrt(7)/3, sqrt(37)/7
    values = path("adam", 0, [2, 1, -3], **HALVES)
    steps = [1 / 2, sqrt(7) / 6, -sqrt(37) / 7 / (sqrt(3) + 1)]
    assert_allclose(values, -np.cumsum(steps), RTOL)


def test_adamax_divides_by_the_decaying_maximum():
    # m = -3/2, -1/4, 7/8; u = 3, 9/4 (decayed), 2; a_t = 2, 4/3, 8/7
    # steps -3/(3 + 1), -1/3/(9/4 + 1), 1/(2 + 1)
    values = path("adamax", 0, [-3, 1, 2], **HALVES)
    assert_allclose(values, -np.cumsum([-3 / 4, -4 / 39, 1 / 3]), RTOL)


def test_amsgrad_never_lowers_its_denominator():
    # m = 1, 1/2, 7/4; v = 1, 3/4, 45/16; its maximum 1, 1, 45/16
    # a_t as in adam; steps 1/2, sqrt(7)/3/2/2, sqrt(37)/4/(3 sqrt(5)/4 + 1)
    values = path("amsgrad", 0, [2, 0, 3], **HALVES)
    steps = [1 / 2, sqrt(7) / 12, sqrt(37) / (3 * sqrt(5) + 4)]
    assert_allclose(values, -np.cumsum(steps), RTOL)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_treat_each_element_of_each_parameter_alike(name):
    rule, defaults = RULES[name]
    hyper = dict(defaults, learning_rate=0.5)
    params, state = [np.array(1.0), np.ones((2, 3)), np.ones((0, 2))], {}
    for g in (0.5, -2.0):
        rule(params, [np.full_like(p, g) for p in params], state, **hyper)
    expected = path(name, 1, [0.5, -2], learning_rate=0.5)[-1]
    for p in params:
        assert_allclose(p, np.full(p.shape, expected), RTOL)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parameters_and_state_keep_their_dtype(name, dtype):
    rule, defaults = RULES[name]
    params, state = [np.ones((), dtype), np.ones(2, dtype)], {}
    rule(params, [0.5, 0.5], state, **dict(defaults, learning_rate=0.5))
    arrays = params + [a for k in state if k != "t" for a in state[k]]
    assert {a.dtype.name for a in arrays} == {dtype}


# ---------------------------------------------------------------- the window


def test_third_call_of_three_applies_the_mean():
    param, window = make_window(3)
    updated, values = [], []
    for g in (1, 2, 6, 3, 3, 3):
        updated.append(call(window, g))
        values.append(float(param))
    assert updated == [False, False, True] * 2
    assert values == [10, 10, 7, 7, 7, 4]  # (1 + 2 + 6)/3 = 3, 9/3 = 3
    assert (window.pending, window.skipped, window.steps) == (0, 0, 2)


def test_flush_divides_by_what_was_collected():
    param, window = make_window(3)
    call(window, 1)
    call(window, 3)
    assert window.pending == 2
    assert window.flush() is True
    assert param == 8  # 10 - (1 + 3)/2
    assert (window.pending, window.steps) == (0, 1)
    assert window.flush() is False
    assert (param, window.steps) == (8, 1)


def test_calls_after_a_flush_start_a_new_window():
    param, window = make_window(3)
    call(window, 100)
    window.flush()
    assert [call(window, g) for g in (1, 2, 3)] == [False, False, True]
    assert param == -92  # 10 - 100 - 6/3


def test_lowering_N_applies_at_the_next_call():
    param, window = make_window(4)
    for g in (1, 2, 3):
        call(window, g)
    window.N = 2
    assert call(window, 6) is True
    assert param == 7  # 10 - 12/4
    assert [call(window, g) for g in (1, 3)] == [False, True]
    assert param == 5


def test_raising_N_lengthens_the_open_window():
    param, window = make_window(2)
    call(window, 1)
    window.N = 3
    assert [call(window, g) for g in (2, 3)] == [False, True]
    assert param == 8  # 10 - 6/3


def test_window_of_one_applies_every_call():
    param, window = make_window(1)
    assert [call(window, g, weight=5) for g in (1, 2)] == [True, True]
    assert param == 7


def test_weights_make_a_weighted_mean():
    param, window = make_window(2)
    call(window, 2, weight=1)
    call(window, 6, weight=3)
    assert param == 5  # 10 - (2 + 18)/4


def test_flush_divides_by_the_weight_collected():
    param, window = make_window(3)
    call(window, 4, weight=0.5)
    call(window, 1, weight=1)
    window.flush()
    assert param == 8  # 10 - (2 + 1)/(3/2)


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_zero_weight_counts_but_adds_nothing(skip_nonfinite):
    param, window = make_window(3, skip_nonfinite=skip_nonfinite)
    updated = [
        call(window, 2, weight=1),
        call(window, nan, weight=0),
        call(window, 4, weight=1),
    ]
    assert updated == [False, False, True]
    assert param == 7  # 10 - (2 + 4)/2
    assert window.skipped == 0


def test_window_of_zero_weight_changes_nothing():
    param, window = make_window(2)
    assert [call(window, g, weight=0) for g in (5, nan)] == [False, False]
    assert (param, window.pending, window.steps) == (10, 0, 0)
    assert (window.state, window.flush()) == ({}, False)
    call(window, 1)
    call(window, 3)
    assert param == 8


def test_flush_of_zero_weight_changes_nothing():
    param, window = make_window(3)
    call(window, 5, weight=0)
    assert window.flush() is False
    assert (param, window.pending, window.steps) == (10, 0, 0)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_skipped_call_leaves_no_trace(bad):
    param, window = make_window(2, skip_nonfinite=True)
    assert [call(window, g) for g in (1, bad, 3)] == [False, False, True]
    assert param == 8  # 10 - (1 + 3)/2
    assert (window.skipped, window.steps) == (1, 1)


def test_skipped_call_is_no_boundary():
    param, window = make_window(3, skip_nonfinite=True)
    call(window, 1)
    call(window, 3)
    window.N = 2
    assert call(window, nan) is False
    assert (param, window.pending) == (10, 2)
    assert call(window, 5) is True
    assert param == 7  # 10 - (1 + 3 + 5)/3


def test_one_bad_element_skips_every_parameter():
    params = [np.zeros(2), np.zeros(())]
    window = Window(params, sgd, 1, skip_nonfinite=True, learning_rate=1.0)
    assert window.call([np.array([1, inf]), np.array(1.0)]) is False
    assert_array_equal(params[0], [0, 0])
    assert params[1] == 0


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nonfinite_gradients_reach_parameters_once(bad):
    param, window = make_window(2)
    assert [call(window, g) for g in (bad, -bad)] == [False, True]
    assert np.isnan(param)
    param[...] = 10
    assert [call(window, g) for g in (1, 3)] == [False, True]
    assert param == 8


@pytest.mark.parametrize("weight", [-1, nan, inf, -inf])
def test_impossible_weight_is_skipped(weight):
    param, window = make_window(1, skip_nonfinite=True)
    assert call(window, 1, weight=weight) is False
    assert (param, window.pending, window.skipped) == (10, 0, 1)


@pytest.mark.parametrize("weight", [-1, nan, inf, -inf])
def test_impossible_weight_without_skip_reaches_parameters(weight):
    param, window = make_window(2)
    assert call(window, 1, weight=weight) is False
    assert param == 10
    assert call(window, 1) is True
    assert np.isnan(param)


def test_reset_forgets_what_is_pending():
    param, window = make_window(3)
    call(window, 100)
    window.reset()
    assert (window.pending, window.flush(), param) == (0, False, 10)


def test_state_moves_at_boundaries_only():
    param = np.array(0.0)
    rule, hyper = RULES["adam"]
    window = Window([param], rule, 2, **hyper)
    ticks = []
    for g in (1, 2, 3, 4):
        call(window, g)
        ticks.append(window.state.get("t", 0))
    assert ticks == [0, 1, 1, 2]


def test_half_precision_is_summed_in_single():
    # 2048 + 1 is 2048 in float16
    param, window = make_window(4, p=0, param_dtype="float16")
    for g in (2048, 1, 1, 2):
        call(window, g)
    assert param == -513  # 2052/4
    assert (param.dtype, window.sums[0].dtype) == ("float16", "float32")


@pytest.mark.parametrize(("dtype", "mean"), [(None, 0), ("float64", 0.5)])
def test_sums_take_the_dtype_asked_for(dtype, mean):
    # 2**25 + 1.5 is 2**25 in float32, whose steps there are of 4
    param, window = make_window(3, 0, param_dtype="float32", dtype=dtype)
    for g in (2**25, 1.5, -(2**25)):
        call(window, g)
    assert (param.dtype, -param) == ("float32", mean)


def test_gradients_are_not_changed():
    grad = np.array([1.0, 2.0])
    window = Window([np.zeros(2)], sgd, 1, learning_rate=1.0)
    window.call([grad], weight=3)
    assert_array_equal(grad, [1, 2])
