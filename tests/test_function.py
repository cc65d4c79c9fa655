"""`function`: two compiled functions, called like one of Theano's."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import lasagne_accum

import numpy as np
import pytest
import reference
import scipy.sparse
from backend import (
    RULES,
    Streams,
    T,
    lasagne_only,
    rules,
    sparse,
    theano,
    theano_only,
)
from numpy.testing import assert_allclose, assert_array_equal

pytestmark = pytest.mark.usefixtures("fast_compile")

# The rounding of a sum of up to 120 terms, in each of up to 8 updates.
TOLERANCE = {d: 1000 * np.finfo(d).eps for d in ("float32", "float64")}

sgd = rules.sgd


def collector(N=2, update_fn=sgd, learning_rate=1.0, inputs=(), **kw):
    """Compile ``w := w - mean gradient``, with the gradients as input."""
    w, g = theano.shared(np.zeros(2), "w"), T.dvector("g")
    train = lasagne_accum.function(
        [g, *inputs],
        None,
        [g],
        [w],
        N=N,
        update_fn=update_fn,
        learning_rate=learning_rate,
        **kw,
    )
    return train, w


def splitter(microbatch, N=1, outputs=None, **kw):
    """Compile ``w := mean of the batch``, in pieces."""
    w, x = theano.shared(np.zeros(2), "w"), T.dmatrix("x")
    loss = ((w - x) ** 2).sum(axis=1).mean() / 2
    train = lasagne_accum.function(
        [x],
        None if outputs is None else outputs(x, loss),
        loss,
        [w],
        N=N,
        update_fn=kw.pop("update_fn", sgd),
        learning_rate=1.0,
        microbatch=microbatch,
        **kw,
    )
    return train, w


def assert_same_state(one, other):
    assert list(one) == list(other)
    for name in one:
        assert_array_equal(one[name], other[name], err_msg=name)


def refused(error, call, *args, **kw):
    """Return the whole text of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **kw)
    return str(caught.value)


# -- Equivalence ----------------------------------------------------------

HYPER = {
    "momentum": {"momentum": 0.75},
    "nesterov_momentum": {"momentum": 0.75},
    "rmsprop": {"rho": 0.75},
    "adadelta": {"rho": 0.75, "epsilon": 0.125},
    "adam": {"beta1": 0.5, "beta2": 0.75},
    "adamax": {"beta1": 0.5, "beta2": 0.75},
    "amsgrad": {"beta1": 0.5, "beta2": 0.75},
}


def regression(dtype):
    """Make a linear regression: parameters, inputs, mean loss."""
    start = [np.arange(-3, 3).reshape(3, 2) / 64, np.zeros(2)]
    params = [theano.shared(p.astype(dtype)) for p in start]
    x, y = T.matrix(dtype=dtype), T.matrix(dtype=dtype)
    errors = x.dot(params[0]) + params[1] - y
    return params, [x, y], (errors**2).sum(axis=1).mean() / 2


def regression_grads(params, x, y):
    """Work out the gradients of the same loss in NumPy."""
    errors = x.dot(params[0]) + params[1] - y
    return [x.T.dot(errors) / len(x), errors.mean(axis=0)]


def batches(N, dtype):
    """Make the micro-batches of two windows, far from where errors cancel."""
    rng = np.random.RandomState(N)
    x = rng.uniform(0.5, 1.5, (2 * N, 2, 3))
    y = rng.uniform(2, 3, (2 * N, 2, 2)) * [1, -1]
    return list(zip(x.astype(dtype), y.astype(dtype)))


@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_ends_where_the_reference_and_the_whole_batch_do(name, floatX):
    hyper = dict(HYPER.get(name, {}), learning_rate=0.0625)
    params, inputs, loss = regression(floatX)
    train = lasagne_accum.function(
        inputs, loss, loss, params, update_fn=RULES[name], **hyper
    )
    whole_params, inputs, loss = regression(floatX)
    updates = RULES[name](loss, whole_params, **hyper)
    whole = theano.function(inputs, updates=updates)
    start = train.get_state()
    whole_start = [variable.get_value() for variable in updates]

    for N in (1, 2, 5):
        train.set_state(start)
        train.N = N
        for variable, value in zip(updates, whole_start):
            variable.set_value(value)
        expected = [p.get_value().astype(float) for p in params]
        rule, defaults = reference.RULES[name]
        window = reference.Window(expected, rule, N, **{**defaults, **hyper})

        stream = batches(N, floatX)
        for x, y in stream:
            train(x, y)
            window.call(regression_grads(expected, x, y))
            assert (train.pending, train.steps) == (
                window.pending,
                window.steps,
            )
        for k in (0, N):
            x, y = zip(*stream[k : k + N])
            whole(np.concatenate(x), np.concatenate(y))

        tolerance = {"rtol": TOLERANCE[floatX], "atol": TOLERANCE[floatX]}
        for param, by_reference, by_rule in zip(
            params, expected, whole_params
        ):
            assert_allclose(param.get_value(), by_reference, **tolerance)
            assert_allclose(
                param.get_value(), by_rule.get_value(), **tolerance
            )


@pytest.mark.parametrize("name", ["nesterov_momentum", "adam"])
def test_nothing_but_the_window_moves_between_boundaries(name):
    train, _ = collector(N=3, update_fn=RULES[name])

    for grad in ([1, 2], [3, 5], [2, 1]):
        train(grad)
    before = train.get_state()
    train([7, 1])
    train([1, 9])

    after = train.get_state()
    moved = [k for k in before if not np.array_equal(before[k], after[k])]
    assert moved == ["w_accumulator", "window_counter"]


@pytest.mark.parametrize("weighted", [False, True])
def test_it_gives_the_bits_of_the_single_function_form(weighted):
    w, g, weight = theano.shared(np.zeros(2)), T.dvector(), T.dscalar()
    updates = lasagne_accum.with_accumulated_gradients(
        [g],
        [w],
        3,
        rules.adam,
        weight=weight if weighted else None,
        learning_rate=0.1,
    )
    single = theano.function(
        [g, weight], updates=updates, on_unused_input="ignore"
    )
    options = {"inputs": [weight], "weight": weight} if weighted else {}
    train, param = collector(3, rules.adam, 0.1, **options)

    for k in range(8):
        grad = [0.1 * k, 1 / (k + 1)]
        train(grad, *([k] if weighted else []))
        single(grad, k)
        assert_array_equal(param.get_value(), w.get_value())

    assert train.flush() == updates.flush() == True  # noqa: E712
    assert_array_equal(param.get_value(), w.get_value())


def test_functions_over_disjoint_parameters_are_independent():
    (two, w), (three, v) = collector(N=2), collector(N=3)

    for k in range(6):
        two([k, 0])
        three([0, k])

    assert (two.steps, three.steps) == (3, 2)
    assert_array_equal(w.get_value(), [-(0 + 1 + 2 + 3 + 4 + 5) / 2, 0])
    assert_array_equal(v.get_value(), [0, -(0 + 1 + 2 + 3 + 4 + 5) / 3])


def test_dropout_masks_differ_in_each_call_and_are_all_used():
    w, x = theano.shared(np.zeros(64)), T.dvector()
    mask = Streams(1).binomial((64,), p=0.5, dtype="float64")
    train = lasagne_accum.function(
        [x], mask, (w * mask * x).sum(), [w],
        N=2, update_fn=sgd, learning_rate=1.0,
    )  # fmt: skip

    masks = [train(np.ones(64)), train(np.ones(64))]

    assert (masks[0] != masks[1]).any()
    assert_array_equal(w.get_value(), -(masks[0] + masks[1]) / 2)


# -- Calls ----------------------------------------------------------------


def test_outputs_come_back_as_from_theano():
    x, w = T.dvector("x"), theano.shared(1.0)
    for outputs in (x.sum(), [x.sum(), x * w], [x], (x, w), [], None):
        train = lasagne_accum.function(
            [x], outputs, w * x.sum(), [w], update_fn=sgd, learning_rate=0
        )
        plain = theano.function([x], outputs, on_unused_input="ignore")

        got, same = train([1, 2]), plain([1, 2])

        assert type(got) is type(same)
        if not isinstance(got, list):
            got, same = [got], [same]
        assert len(got) == len(same)
        for value, other in zip(got, same):
            assert_array_equal(value, other)
            assert value.dtype == other.dtype


def test_outputs_are_computed_before_the_parameters_change():
    w = theano.shared(4.0)
    train = lasagne_accum.function(
        [], [w, w**2], w**2, [w], update_fn=sgd, learning_rate=0.25
    )
    assert train() == [4, 16]
    assert train() == [2, 4]


def test_inputs_are_taken_by_name_and_converted():
    train, w = collector(N=1)
    train(g=[1, 2])
    train([1, 2])
    train(np.array([1, 2], "int8"))
    assert_array_equal(w.get_value(), [-3, -6])


def test_arguments_are_not_held_on_to():
    rate, grad = np.array([1.0, 1.0]), np.array([1.0, 2.0])
    rates = T.dvector("rates")
    train, w = collector(5, learning_rate=rates, inputs=[rates])

    train(grad, rate)
    rate[:], grad[:] = 9, 9
    train.flush()

    assert_array_equal(w.get_value(), [-1, -2])


def test_pending_steps_and_updated_follow_the_calls():
    train, _ = collector(N=3)
    followed = [(train.pending, train.steps, train.updated)]
    for _ in range(4):
        train([1, 1])
        followed.append((train.pending, train.steps, train.updated))

    assert followed == [
        (0, 0, False), (1, 0, False), (2, 0, False), (0, 1, True),
        (1, 1, False),
    ]  # fmt: skip
    assert train.skipped == 0


def test_flush_divides_by_what_was_collected():
    train, w = collector(N=5)
    train([2, 4])
    train([4, 4])

    assert train.flush() is True

    assert (train.updated, train.pending, train.steps) == (True, 0, 1)
    assert_array_equal(w.get_value(), [-3, -4])


def test_flush_of_an_empty_window_does_nothing():
    train, _ = collector(N=2, update_fn=rules.adam)
    assert train.flush() is False
    train([1, 1])
    train.flush()
    before = train.get_state()

    assert train.flush() is False

    assert (train.updated, train.steps) == (False, 1)
    assert_same_state(train.get_state(), before)


def test_reset_forgets_the_window_and_nothing_else():
    train, w = collector(N=2)
    train([1, 1])
    train([1, 1])
    train([100, 100])

    train.reset()

    assert (train.pending, train.steps) == (0, 1)
    train([2, 3])
    train([2, 3])
    assert_array_equal(w.get_value(), [-3, -4])


def test_updates_are_made_on_each_call():
    count = theano.shared(np.zeros(1), "count")
    for updates in ({count: count + 1}, [(count, count + 1)]):
        count.set_value([0])
        train, _ = collector(N=2, updates=updates)
        for calls in (1, 2, 3):
            train([1, 1])
            assert count.get_value() == calls
        train.flush()
        assert count.get_value() == 3


def test_updates_of_what_the_rule_updates_are_refused():
    w, x = theano.shared(1.0, "w"), T.dscalar()
    message = refused(
        ValueError, lasagne_accum.function, [x], None, w * x, [w],
        update_fn=sgd, learning_rate=1, updates={w: w + 1},
    )  # fmt: skip
    assert message == (
        "`updates` must not have what the update rule updates, got w. Update "
        "it in the rule or here."
    )


@pytest.mark.parametrize("N", [1, 2])
def test_the_rule_sees_what_updates_move_as_it_was_before_the_call(N):
    w, rate, x = (
        theano.shared(0.0, "w"),
        theano.shared(8.0, "rate"),
        T.dscalar(),
    )
    train = lasagne_accum.function(
        [x], None, w * x, [w],
        N=N, update_fn=sgd, learning_rate=rate, updates={rate: rate / 2},
    )  # fmt: skip

    for _ in range(N):
        train(1)
    assert w.get_value() == -8 / N
    saved = train.get_state()
    assert rate.get_value() == saved["rate"] == 8 / 2**N
    for _ in range(N):
        train(1)
    assert w.get_value() == -8 / N - 8 / 2**N / N


def test_a_rule_that_reads_what_is_split_is_refused():
    w, x, rate = theano.shared(0.0, "w"), T.dvector("x"), T.dscalar("rate")
    make = functools.partial(
        lasagne_accum.function, [x, rate], None, (w * x).mean(), [w],
        update_fn=sgd, microbatch=2,
    )  # fmt: skip
    assert refused(ValueError, make, learning_rate=x.sum()) == (
        "`update_fn` must not read what `microbatch` splits, got x. Pass what "
        "it needs as an input without a batch axis."
    )
    make(learning_rate=rate)([1, 2, 6], 2)
    assert w.get_value() == -6


def test_an_update_given_twice_is_refused():
    w, z, x = theano.shared(1.0, "w"), theano.shared(0.0, "z"), T.dscalar()
    make = functools.partial(lasagne_accum.function, [x], None, w * x, [w])
    twice = [(z, z + 1), (z, z + 2)]
    assert refused(
        ValueError, make, update_fn=sgd, learning_rate=1, updates=twice
    ) == (
        "`updates` must update each variable once, got several updates of z. "
        "Leave one."
    )
    assert refused(ValueError, make, update_fn=lambda *args: twice) == (
        "`update_fn` must update each variable once, got several updates of "
        "z. Leave one."
    )


def test_parameters_of_integers_are_refused():
    n, x = theano.shared(1, "n"), T.dscalar()
    assert refused(
        ValueError, lasagne_accum.function, [x], None, [x], [n],
        update_fn=sgd, learning_rate=1,
    ) == (
        "`params` must have floating-point dtypes, got n of int64. A mean "
        "gradient is none otherwise; update it in the rule or by hand."
    )  # fmt: skip


def test_a_carried_value_of_another_kind_is_refused_before_all_else():
    w, rates, x = theano.shared(np.ones(2), "w"), T.drow("rates"), T.dscalar()
    train = lasagne_accum.function(
        [x, rates], None, (w * x).sum(), [w],
        N=2, update_fn=lambda g, p: [(w, w - rates[0] * g[0])],
    )  # fmt: skip
    train(1, [[1, 1]])
    before = train.get_state()
    for bad in (np.zeros(2), np.zeros((2, 2))):
        refused(
            ValueError,
            train.set_state,
            dict(before, w=np.zeros(2), rates_carried=bad),
        )
        assert_array_equal(w.get_value(), [1, 1])
    train.set_state(dict(before, rates_carried=np.full((1, 2), 3.0)))
    train.flush()
    assert_array_equal(w.get_value(), [-2, -2])


@theano_only
def test_a_batch_left_to_its_default_is_refused():
    w, x, y = theano.shared(0.0, "w"), T.dvector("x"), T.dvector("y")
    train = lasagne_accum.function(
        [theano.In(x, value=np.ones(4)), y], None, (w * x * y).mean(), [w],
        update_fn=sgd, learning_rate=1, microbatch=2,
    )  # fmt: skip
    assert "must all be given" in refused(ValueError, train, y=[1, 2, 3, 4])
    train([1, 1, 1, 1], [1, 2, 3, 4])
    assert w.get_value() == -2.5


@pytest.mark.parametrize("wrong", [theano.Out, lambda loss: {"loss": loss}])
def test_outputs_that_are_no_expressions_are_refused(wrong):
    w, x = theano.shared(0.0, "w"), T.dscalar()
    output = wrong(w * x)
    message = refused(
        TypeError, lasagne_accum.function, [x], output, w * x, [w],
        update_fn=sgd, learning_rate=1,
    )  # fmt: skip
    assert message == (
        "`outputs` must be an expression or a list of them, got "
        f"{output!r}. Pass the variables themselves."
    )


def test_givens_may_be_numbers():
    w, x, s = theano.shared(0.0, "w"), T.dscalar(), T.dscalar("s")
    train = lasagne_accum.function(
        [x], w * x * s, w * x * s, [w],
        update_fn=sgd, learning_rate=s, givens={s: 3.0},
    )  # fmt: skip
    train(2)
    assert w.get_value() == -18


def test_updates_that_are_none_are_refused():
    for wrong in ("w", {"w": 1}):
        assert refused(TypeError, collector, updates=wrong) == (
            "`updates` must give shared variables their updates, in a "
            f"dictionary or list of pairs, got {wrong!r}. See "
            "lasagne.updates for examples."
        )


def test_a_missing_rule_is_refused():
    refused(TypeError, collector, update_fn=None)


def test_mode_and_name_go_to_both_functions():
    mode = theano.Mode(linker="py", optimizer=None)
    train, _ = collector(mode=mode, name="train")
    assert train.accumulate.maker.mode.linker.__class__ is type(mode.linker)
    assert train.apply.maker.mode.linker.__class__ is type(mode.linker)
    assert (train.accumulate.name, train.apply.name) == (
        "train",
        "train_apply",
    )


def test_data_on_shared_variables_is_indexed_through_givens():
    data = theano.shared(np.arange(12.0).reshape(6, 2))
    w, x, i = theano.shared(np.zeros(2)), T.dmatrix(), T.lscalar()
    loss = ((w - x) ** 2).sum(axis=1).mean() / 2
    train = lasagne_accum.function(
        [i], loss, loss, [w],
        N=3, update_fn=sgd, learning_rate=1.0,
        givens={x: data[2 * i : 2 * i + 2]},
    )  # fmt: skip

    losses = [float(train(i)) for i in range(3)]

    assert losses == [(0 + 1 + 4 + 9) / 4, (16 + 25 + 36 + 49) / 4, 91.5]
    assert_array_equal(w.get_value(), [5, 6])


def test_indices_into_shared_data_are_split():
    data = theano.shared(np.arange(12.0).reshape(6, 2))
    w, x, rows = theano.shared(np.zeros(2)), T.dmatrix(), T.lvector()
    loss = ((w - x) ** 2).sum(axis=1)
    train = lasagne_accum.function(
        [rows], loss, loss.mean() / 2, [w],
        update_fn=sgd, learning_rate=1.0, microbatch=2,
        givens=[(x, data[rows])],
    )  # fmt: skip

    losses = train([5, 0, 1])

    assert_array_equal(losses, [221, 1, 13])
    assert_array_equal(w.get_value(), [4, 5])


# -- N --------------------------------------------------------------------


def test_N_may_shrink_inside_a_window():
    train, w = collector(N=4)
    for grad in (1, 2, 3):
        train([grad, 0])

    train.N = 2

    assert (train.N, train.pending, train.steps) == (2, 3, 0)
    train([6, 0])
    assert (train.pending, train.steps, train.updated) == (0, 1, True)
    assert_array_equal(w.get_value(), [-3, 0])
    train([1, 0])
    train([3, 0])
    assert_array_equal(w.get_value(), [-5, 0])


def test_N_may_grow_inside_a_window():
    train, w = collector(N=2)
    train([1, 0])

    train.N = np.int64(3)

    assert type(train.N) is int
    train([2, 0])
    assert train.pending == 2
    train([6, 0])
    assert_array_equal(w.get_value(), [-3, 0])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        (float("nan"), TypeError),
        ("4", TypeError),
        (None, TypeError),
    ],
)
def test_wrong_N_is_refused_when_made_and_when_set(wrong, error):
    message = (
        f"`N` must be a positive integer, got {wrong!r}. Pass 1 to apply "
        "every update."
    )
    assert refused(error, collector, N=wrong) == message

    train, _ = collector(N=3)
    assert refused(error, setattr, train, "N", wrong) == message
    assert train.N == 3


def test_N_set_beyond_all_counters_is_refused():
    train, _ = collector(N=2)
    assert refused(ValueError, setattr, train, "N", 2**70) == (
        f"`N` must be at most 2**63 - 1, got {2**70}. Pass that for windows "
        "that `flush` alone completes."
    )
    assert train.N == 2


def test_N_cannot_be_set_to_a_symbolic_one():
    train, _ = collector(N=3)
    assert refused(TypeError, setattr, train, "N", T.lscalar("n")) == (
        "`N` must be set to a positive integer, got n. Pass a symbolic one "
        "to `function`."
    )


def test_N_may_be_a_shared_variable():
    N = theano.shared(np.int32(4), "N")
    train, w = collector(N=N)
    assert train.N is N

    for grad in (1, 2, 3):
        assert train([grad, 0]) == []
    N.set_value(2)
    train([6, 0])
    assert_array_equal(w.get_value(), [-3, 0])

    N.set_value(3)
    for grad in (1, 2, 3):
        train([grad, 0])
    assert_array_equal(w.get_value(), [-5, 0])


def test_N_set_to_a_number_takes_the_place_of_a_symbolic_one():
    N = theano.shared(np.int32(4), "N")
    train, w = collector(N=N)

    train.N = 1

    assert train([3, 0]) == []
    assert_array_equal(w.get_value(), [-3, 0])


def test_N_may_be_an_input_of_the_function():
    n = T.iscalar("n")
    train, w = collector(N=n, inputs=[n])

    followed = []
    for N in (3, 3, 2, 2, 5, 2):
        train([N, 0], N)
        followed.append(train.updated)

    assert followed == [False, False, True, False, False, True]
    assert_array_equal(w.get_value(), [-(3 + 3 + 2) / 3 - (2 + 5 + 2) / 3, 0])


def test_N_may_be_symbolic_beside_microbatch_and_outputs():
    N = theano.shared(np.int8(2), "N")
    train, w = splitter(2, N=N, outputs=lambda x, loss: [x.sum(), x])

    total, rows = train([[1, 1], [2, 2], [3, 3]])

    assert total == (6 * 2 + 6) / 3  # the mean over three samples
    assert_array_equal(rows, [[1, 1], [2, 2], [3, 3]])
    assert train.pending == 1
    train([[6, 6]])
    assert_array_equal(w.get_value(), [3, 3])


# -- Weights --------------------------------------------------------------


def weighted(**kw):
    weight = T.dscalar("weight")
    return collector(inputs=[weight], weight=weight, **kw)


def test_weights_make_unequal_calls_equal_the_whole():
    train, w = weighted(N=3)
    train([2, 0], 1)
    train([4, 8], 2)
    train([6, 8], 5)
    assert_array_equal(w.get_value(), [-(2 + 8 + 30) / 8, -(0 + 16 + 40) / 8])


def test_zero_weight_contributes_nothing_but_counts():
    train, w = weighted(N=2)
    train([1, 2], 4)
    train([np.nan, np.inf], 0)
    assert (train.updated, train.pending) == (True, 0)
    assert_array_equal(w.get_value(), [-1, -2])


def test_a_window_of_no_weight_changes_nothing():
    train, _ = weighted(N=2, update_fn=rules.adam)
    train([1, 1], 1)
    train.flush()
    before = train.get_state()

    for _ in range(2):
        train([np.nan, 1], 0)
    assert (train.updated, train.pending, train.steps) == (False, 0, 1)
    assert_same_state(train.get_state(), before)

    train([1, 1], 0)
    assert train.flush() is False
    assert (train.updated, train.pending) == (False, 0)
    assert_same_state(train.get_state(), before)


@pytest.mark.parametrize("bad", [-1, np.nan, np.inf, -np.inf])
def test_a_bad_weight_is_a_bad_call(bad):
    train, w = weighted(N=2)
    train([1, 1], 1)
    train([1, 1], bad)
    assert np.isnan(w.get_value()).all()

    w.set_value([0, 0])
    train([1, 3], 1)
    train([3, 5], 1)
    assert_array_equal(w.get_value(), [-2, -4])


@pytest.mark.parametrize("bad", [-1, np.nan, np.inf, -np.inf])
def test_a_bad_weight_is_skipped_with_skip_nonfinite(bad):
    train, w = weighted(N=2, skip_nonfinite=True)
    train([1, 1], 1)
    train([1, 1], bad)
    assert (train.skipped, train.pending) == (1, 1)
    train([5, 5], 3)
    assert_array_equal(w.get_value(), [-4, -4])


def test_more_samples_than_the_dtype_can_count_are_a_bad_call():
    train, w = splitter(40000, N=2, accumulator_dtype="float16")
    train(np.ones((40000, 2)))
    train(np.ones((40000, 2)))
    assert np.isnan(w.get_value()).all()


# -- Bad micro-batches, dtypes --------------------------------------------


def test_a_skipped_call_is_as_if_it_had_never_come():
    train, w = collector(N=2, update_fn=rules.adam, skip_nonfinite=True)
    plain, v = collector(N=2, update_fn=rules.adam)
    for grad in ([1, 2], [np.nan, 1], [3, 5], [1, -np.inf], [2, 2]):
        train(grad)
        if np.isfinite(grad).all():
            plain(grad)
            assert train.updated == plain.updated
        else:
            assert not train.updated
    assert (train.skipped, train.pending) == (2, 1)
    assert_array_equal(w.get_value(), v.get_value())


def test_a_skipped_call_is_never_a_boundary():
    train, w = collector(N=3, skip_nonfinite=True)
    train([1, 1])
    train([3, 3])
    train.N = 2

    train([np.inf, 1])
    assert (train.updated, train.pending) == (False, 2)

    train([5, 5])
    assert (train.updated, train.pending) == (True, 0)
    assert_array_equal(w.get_value(), [-3, -3])


def test_a_nan_reaches_the_parameters_once():
    train, w = collector(N=2)
    train([np.nan, 1])
    train([1, 1])
    assert_array_equal(w.get_value(), [np.nan, -1])

    w.set_value([0, 0])
    train([1, 1])
    train([3, 3])
    assert_array_equal(w.get_value(), [-2, -2])


@pytest.mark.parametrize(
    ("dtype", "large", "mean"),
    [(None, 2**24, 0), ("float64", 2**24, 0.5), ("float16", 2048, 0)],
)
def test_accumulator_dtype_is_that_of_the_sums(dtype, large, mean):
    w, g = theano.shared(np.zeros(1, "float32"), "w"), T.fvector()
    train = lasagne_accum.function(
        [g], None, [g], [w],
        N=4, update_fn=sgd, learning_rate=np.float32(1),
        accumulator_dtype=dtype,
    )  # fmt: skip

    for grad in (large, 1, 1, -large):
        train([grad])

    assert train.get_state()["w_accumulator"].dtype == (dtype or "float32")
    assert w.get_value() == -mean


# -- Learning rates -------------------------------------------------------


def test_a_learning_rate_among_the_inputs_is_the_boundarys():
    rate = T.dscalar("rate")
    train, w = collector(2, learning_rate=rate, inputs=[rate])
    train([1, 1], 100)
    train([3, 3], 0.5)
    assert_array_equal(w.get_value(), [-1, -1])

    train([1, 1], 100)
    train([3, 3], rate=0.25)
    assert_array_equal(w.get_value(), [-1.5, -1.5])


def test_flush_takes_the_learning_rate_of_the_last_call():
    rate = T.dscalar("rate")
    train, w = collector(3, learning_rate=rate, inputs=[rate])
    train([1, 1], 100)
    train([3, 3], 0.5)
    train.flush()
    assert_array_equal(w.get_value(), [-1, -1])


def test_a_learning_rate_among_the_inputs_is_part_of_the_state():
    rate = T.dscalar("rate")
    first, _ = collector(3, learning_rate=rate, inputs=[rate])
    second, w = collector(3, learning_rate=rate, inputs=[rate])
    first([2, 4], 0.5)

    second.set_state(first.get_state())
    second.flush()

    assert_array_equal(w.get_value(), [-1, -2])


def test_an_input_vector_of_the_rule_is_part_of_the_state():
    rates = T.dvector("rates")
    first, _ = collector(3, learning_rate=rates, inputs=[rates])
    second, w = collector(3, learning_rate=rates, inputs=[rates])
    first([2, 4], [0.5, 0.25])

    second.set_state(first.get_state())
    second.flush()

    assert_array_equal(w.get_value(), [-1, -1])


def test_a_learning_rate_may_come_through_givens():
    rates = theano.shared(np.array([1.0, 0.5, 0.25]))
    rate, epoch = T.dscalar("rate"), T.lscalar("epoch")
    train, w = collector(
        2, learning_rate=rate, inputs=[epoch], givens={rate: rates[epoch]}
    )
    train([1, 1], 0)
    train([3, 3], 1)
    assert_array_equal(w.get_value(), [-1, -1])


def test_a_shared_learning_rate_is_that_of_the_boundary():
    rate = theano.shared(100.0)
    train, w = collector(2, learning_rate=rate)
    train([1, 1])
    rate.set_value(0.5)
    train([3, 3])
    rate.set_value(100.0)
    assert_array_equal(w.get_value(), [-1, -1])


# -- Gradients in the velocity --------------------------------------------


def in_place(N, **kw):
    momentum = lasagne_accum.updates.momentum
    options = dict(momentum=0.5, in_place=True, **kw)
    return collector(N, momentum, 0.25, **options)


@lasagne_only
def test_gradients_in_the_velocity_make_the_steps_of_momentum():
    train, w = in_place(4)
    plain, v = collector(4, rules.momentum, 0.25, momentum=0.5)
    for k in range(12):
        assert train([k, k * k]) == plain([k, k * k]) == []
        assert (train.pending, train.steps, train.updated) == (
            plain.pending,
            plain.steps,
            plain.updated,
        )
        assert_array_equal(w.get_value(), v.get_value())
    assert "w_accumulator" not in train.get_state()


@lasagne_only
def test_a_window_in_the_velocity_is_neither_flushed_nor_resized():
    train, _ = in_place(2)
    assert train.flush() is False
    train([1, 1])
    before = train.get_state()

    assert refused(ValueError, train.flush) == (
        "`flush` must find the gradients apart from the momentum, got "
        "updates with `in_place=True`. Complete the window, or leave "
        "`in_place` out."
    )
    assert refused(ValueError, setattr, train, "N", 3) == (
        "`N` must stay as it was with `in_place`, got 3. Leave `in_place` "
        "out to change it."
    )
    assert train.N == 2
    assert_same_state(train.get_state(), before)


def test_other_rules_do_not_collect_in_place():
    assert refused(ValueError, collector, in_place=True) == (
        "`in_place` must go with lasagne_accum.updates.momentum, got "
        f"{sgd!r}. Pass it as `update_fn`, or leave `in_place` out."
    )


# -- State ----------------------------------------------------------------


def noisy_network():
    """Dropout, Adam, N=3: all kinds of state at once."""
    w, x = theano.shared(np.linspace(-1, 1, 8), "w"), T.dmatrix("x")
    streams = Streams(7)
    mask = streams.binomial((8,), p=0.5, dtype="float64")
    count = theano.shared(0, "count")
    loss = ((x * w * mask).sum(axis=1) ** 2).mean()
    return lasagne_accum.function(
        [x], loss, loss, [w],
        N=3, update_fn=rules.adam, learning_rate=0.1,
        weight=x.sum(), skip_nonfinite=True, updates={count: count + 1},
    )  # fmt: skip


def test_training_goes_on_bit_for_bit_from_every_point(tmp_path):
    train, resumed = noisy_network(), noisy_network()
    stream = np.random.RandomState(0).uniform(0, 1, (8, 2, 8))
    stream[4, 1, 1] = np.nan  # a skipped one

    states = [train.get_state()]
    losses = []
    for x in stream:
        losses.append(train(x))
        states.append(train.get_state())

    assert {state["window_counter"].item() for state in states} == {0, 1, 2}
    for offset, state in enumerate(states):
        path = tmp_path / f"{offset}.npz"
        np.savez(str(path), **state)
        with np.load(str(path)) as saved:
            resumed.set_state(saved)
        assert resumed.pending == state["window_counter"]
        again = [resumed(x) for x in stream[offset:]]
        assert_array_equal(again, losses[offset:])
        assert_same_state(resumed.get_state(), states[-1])
    assert (resumed.steps, resumed.skipped, resumed.pending) == (2, 1, 1)


def test_a_state_is_a_copy():
    train, _ = collector(N=2)
    train([1, 1])
    state = train.get_state()
    train([1, 1])
    assert state["steps"] == 0
    assert state["window_counter"] == 1
    assert_array_equal(state["w_accumulator"], [1, 1])


def noise_in_the_rule(stream):
    def noisy_sgd(grads, params, learning_rate):
        noisy = [g + stream.normal((2,), dtype="float64") for g in grads]
        return sgd(noisy, params, learning_rate)

    return collector(1, update_fn=noisy_sgd)


def noise_in_givens(stream):
    w, x, g = theano.shared(np.zeros(2)), T.dvector(), T.dvector()
    train = lasagne_accum.function(
        [g], None, [x], [w],
        update_fn=sgd, learning_rate=1.0,
        givens={x: g + stream.normal((2,), dtype="float64")},
    )  # fmt: skip
    return train, w


@pytest.mark.parametrize("noisy", [noise_in_the_rule, noise_in_givens])
def test_random_streams_are_part_of_the_state_wherever_they_are_used(noisy):
    first, w = noisy(Streams(3))
    second, v = noisy(Streams(3))
    first([1, 1])

    second.set_state(first.get_state())
    first([1, 1])
    second([1, 1])

    assert_array_equal(w.get_value(), v.get_value())


def test_a_state_that_does_not_fit_is_refused_whole():
    train, _ = collector(N=2)
    train([1, 2])
    before = train.get_state()
    wrong = dict(before, w=np.ones(2), steps=np.zeros(3, "int64"))

    with pytest.raises(ValueError, match=r"got int64\(3,\) for 'steps' of"):
        train.set_state(wrong)

    assert_same_state(train.get_state(), before)


def test_a_state_of_fewer_than_no_calls_is_refused_whole():
    train, _ = collector(N=2)
    train([1, 2])
    before = train.get_state()
    wrong = dict(before, w=np.ones(2), window_counter=np.array(-1))
    assert refused(ValueError, train.set_state, wrong) == (
        "`values` must have counts and weights from 0 up, got -1 for "
        "'window_counter'. Restore what `get_state` gave."
    )
    assert_same_state(train.get_state(), before)


# -- microbatch -----------------------------------------------------------


def test_a_split_batch_gives_what_the_whole_one_does(floatX):
    rng = np.random.RandomState(0)
    params = [theano.shared(rng.normal(size=5).astype(floatX), "w")]
    whole_params = [theano.shared(p.get_value()) for p in params]
    x, t, image = T.matrix("x"), T.ivector("t"), T.tensor4("image")
    scale, shift = T.scalar("scale"), T.row("shift")
    inputs = [x, t, image, scale, shift]

    def network(w):
        scores = (x + shift).dot(w) * scale + image.sum(axis=(1, 2, 3))
        errors = (scores - t) ** 2
        loss = errors.mean()
        outputs = [
            loss, errors, (x + shift) * w, T.gt(scores, 0), t, image,
            loss.astype("float16"), loss.astype("float64"),
        ]  # fmt: skip
        return outputs, loss

    outputs, loss = network(whole_params[0])
    adam = rules.adam
    whole = theano.function(
        inputs, outputs, updates=adam(loss, whole_params, 0.125)
    )
    outputs, loss = network(params[0])
    train = lasagne_accum.function(
        inputs, outputs, loss, params,
        update_fn=adam, learning_rate=0.125, microbatch=50,
    )  # fmt: skip
    asked = []
    accumulate = train.accumulate
    train.accumulate = lambda *args, **kw: (
        asked.append([np.shape(a) for a in [*args, *kw.values()]])
        or accumulate(*args, **kw)
    )

    for _ in range(2):
        data = [
            rng.normal(size=(120, 5)).astype(floatX),
            rng.randint(0, 3, 120).astype("int32"),
            rng.normal(size=(120, 1, 2, 2)).astype(floatX),
            np.asarray(0.5, floatX),
            rng.normal(size=(1, 5)).astype(floatX),
        ]
        got = train(*data[:3], shift=data[4], scale=data[3])
        for value, same in zip(got, whole(*data)):
            assert value.dtype == same.dtype
            assert value.shape == same.shape
            tolerance = max(TOLERANCE[floatX], np.finfo("float16").eps)
            if value.dtype != "float16":
                tolerance = TOLERANCE[floatX]
            assert_allclose(value, same, rtol=tolerance, atol=tolerance)

    assert asked[:3] == [
        [(n, 5), (n,), (n, 1, 2, 2), (1, 5), ()] for n in (50, 50, 20)
    ]
    assert (train.steps, train.pending) == (2, 0)
    assert_allclose(
        params[0].get_value(),
        whole_params[0].get_value(),
        rtol=TOLERANCE[floatX],
        atol=TOLERANCE[floatX],
    )


def test_a_split_call_counts_once():
    train, w = splitter(2, N=2)

    train([[1, 1], [2, 2], [3, 3]])
    assert (train.pending, train.updated) == (1, False)

    train([[9, 9]])
    assert (train.pending, train.updated) == (0, True)
    # Weighted by their lengths, the two calls are one batch of four.
    assert_array_equal(w.get_value(), [3.75, 3.75])


def test_lists_and_keywords_are_split_too():
    train, w = splitter(2, outputs=lambda x, loss: x)
    for rows in (train([[1, 2], [3, 4], [5, 6]]), train(x=[[1, 2]] * 3)):
        assert rows.shape == (3, 2)
    assert_array_equal(w.get_value(), [1, 2])


def test_a_piece_as_large_as_the_batch_is_the_whole():
    train, w = splitter(3, outputs=lambda x, loss: [x.shape[0], loss, x])
    for x in ([[1, 2], [3, 4]], [[1, 2], [3, 4], [5, 6]]):
        length, _, rows = train(x)
        assert length == len(rows) == len(x)
        assert_array_equal(w.get_value(), np.mean(x, axis=0))


def test_updates_are_made_on_each_piece():
    count = theano.shared(0, "count")
    train, _ = splitter(2, updates={count: count + 1})
    train(np.ones((5, 2)))
    assert count.get_value() == 3


def two_inputs(**kw):
    w, x, y = theano.shared(0.0), T.dvector("x"), T.dvector("y")
    return lasagne_accum.function(
        [x, y], None, (w * x.sum() * y.sum()), [w],
        update_fn=sgd, learning_rate=1.0, **kw,
    )  # fmt: skip


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1]), ([], [])])
def test_unequal_or_empty_batches_raise_before_anything_runs(x, y):
    train = two_inputs(N=3, microbatch=2)
    train([1, 2, 3], [1, 2, 3])
    before = train.get_state()

    assert refused(ValueError, train, x, y) == (
        "`inputs` with a batch axis must all be given, with the same number "
        f"of samples, at least one, got {[len(x), len(y)]}. Hold what has no "
        "batch axis in a shared variable."
    )
    assert train.pending == 1
    assert_same_state(train.get_state(), before)


def test_an_output_without_a_row_for_each_sample_is_refused():
    train, _ = splitter(2, outputs=lambda x, loss: x.sum(axis=0))
    train([[1, 1], [2, 2]])
    before = train.get_state()

    for length, got in (
        (5, "[(2,), (2,), (2,)] for pieces of [2, 2, 1]"),
        (1, "[(2,)] for pieces of [1]"),
    ):
        assert refused(ValueError, train, np.ones((length, 2))) == (
            "`outputs` must be scalars or have a row for each sample, got "
            f"{got} samples. Compute such an output in a function of its own."
        )
    assert train.pending == 0
    assert_same_state(train.get_state(), before)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        ("x", ValueError),
        (1.5, TypeError),
        ([2], TypeError),
    ],
)
def test_wrong_microbatch_is_refused(wrong, error):
    assert refused(error, splitter, wrong) == (
        '`microbatch` must be a positive integer or "auto", got '
        f"{wrong!r}. Leave it out for no splitting."
    )


def test_microbatch_may_be_a_numpy_integer_or_none():
    assert splitter(np.int64(2))[0].steps == 0
    train, w = splitter(None)
    train([[1, 1], [3, 3]])
    assert_array_equal(w.get_value(), [2, 2])


def test_microbatch_needs_a_batch_axis():
    w, i, row = theano.shared(0.0), T.lscalar("i"), T.row("row")
    message = refused(
        ValueError, lasagne_accum.function,
        [i, row], None, w * i * row.sum(), [w],
        update_fn=sgd, learning_rate=1.0, microbatch=2,
    )  # fmt: skip
    assert message == (
        "`inputs` must have one with a batch axis to split for `microbatch`, "
        "got [i, row]. Pass the batch itself, or leave `microbatch` out."
    )


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_inputs_are_split_too(kind, weighted):
    x = sparse.matrix(kind[:3], dtype="float64")
    w, y = theano.shared(np.ones(3), "w"), T.dvector("y")
    product = sparse.structured_dot(x, w.dimshuffle(0, "x"))
    errors = product.flatten() - y
    train = lasagne_accum.function(
        [x, y], [errors, errors.mean()], (errors**2).mean() / 2, [w],
        update_fn=sgd, learning_rate=1.0, microbatch=2,
        weight=y.shape[0] if weighted else None,
    )  # fmt: skip
    rows = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 3], [4, 0, 0], [0, 0, 5.0]])
    targets = np.arange(5.0)

    each, mean = train(getattr(scipy.sparse, kind)(rows), targets)

    expected = rows.sum(axis=1) - targets
    assert_allclose(each, expected)
    assert_allclose(mean, expected.mean())
    assert_allclose(w.get_value(), 1 - rows.T.dot(expected) / 5)


def test_inputs_in_theanos_wrapper_are_split_by_its_name():
    w, x = theano.shared(np.zeros(2)), T.dmatrix("x")
    train = lasagne_accum.function(
        [theano.In(x, name="data")], x, ((w - x) ** 2).mean(axis=0).sum(),
        [w], update_fn=sgd, learning_rate=0.5, microbatch=2,
    )  # fmt: skip
    for rows in (train([[1, 2]] * 3), train(data=[[1, 2]] * 3)):
        assert rows.shape == (3, 2)
    assert_array_equal(w.get_value(), [1, 2])


def masked(**kw):
    """Compile a loss that is a mean over unmasked samples."""
    w, x, mask = theano.shared(np.zeros(2)), T.dmatrix("x"), T.dvector("mask")
    losses = ((w - x) ** 2).sum(axis=1) / 2
    loss = losses.dot(mask) / mask.sum()
    train = lasagne_accum.function(
        [x, mask], [loss, losses], loss, [w],
        update_fn=sgd, learning_rate=1.0, weight=mask.sum(), microbatch=2,
        **kw,
    )  # fmt: skip
    return train, w


def test_a_weight_is_that_of_each_piece():
    train, w = masked()
    x = np.arange(10.0).reshape(5, 2) ** 2
    mask = np.array([1, 0, 1, 1, 1.0])

    loss, losses = train(x, mask)

    assert_array_equal(losses, (x**2).sum(axis=1) / 2)
    assert_allclose(loss, losses.dot(mask) / 4, rtol=TOLERANCE["float64"])
    expected = mask.dot(x) / 4
    assert_allclose(w.get_value(), expected, rtol=TOLERANCE["float64"])


def test_a_piece_of_no_weight_has_no_say():
    train, w = masked()
    x = np.arange(10.0).reshape(5, 2)

    # The mean of an empty piece is 0 / 0.
    loss, losses = train(x, [0, 0, 1, 1, 0])

    assert loss == losses[2:4].mean()
    assert_array_equal(w.get_value(), [5, 6])
    assert (train.updated, train.pending) == (True, 0)


def test_a_call_of_no_weight_counts_and_changes_nothing():
    train, w = masked(N=2)
    x = np.arange(10.0).reshape(5, 2)

    loss, _ = train(x, np.zeros(5))
    assert np.isnan(loss)
    assert (train.updated, train.pending) == (False, 1)

    train(x, [0, 0, 0, 1, 0])
    assert (train.updated, train.pending) == (True, 0)
    assert_array_equal(w.get_value(), [6, 7])


def test_bad_pieces_are_skipped_one_by_one():
    train, w = splitter(2, N=2, skip_nonfinite=True)
    bad, good = [[np.nan, 0], [1, 1]], [[1, 2], [3, 4]]

    train(bad + good + bad)
    assert (train.skipped, train.pending) == (2, 1)

    train(bad)
    assert (train.skipped, train.pending, train.updated) == (3, 1, False)

    train([*good, [5, 6], [7, 8], [np.inf, 0]])
    assert (train.skipped, train.pending, train.updated) == (4, 0, True)
    assert_allclose(w.get_value(), [20 / 6, 26 / 6], rtol=1e-14)


def test_a_split_call_can_be_flushed_saved_and_reset():
    (train, _), (resumed, w) = splitter(2, N=3), splitter(2, N=3)
    train([[1, 1], [2, 2], [6, 6]])

    resumed.set_state(train.get_state())
    assert resumed.pending == 1
    assert resumed.flush() is True

    assert_array_equal(w.get_value(), [3, 3])
    train.reset()
    assert (train.pending, train.flush()) == (0, False)


# -- microbatch="auto" under a real limit of memory -----------------------

CHILD = """
    import json
    import resource
    import sys
    import warnings

    import lasagne_accum
    import numpy as np
    from backend import T, rules, theano

    WIDTH = 2 ** 14  # each array of the graph takes 128 KiB for each sample


    def network():
        w = theano.shared(np.ones(2), "w")
        x, width = T.dmatrix("x"), T.lscalar("width")
        copies = T.alloc(x.dot(w), width, x.shape[0]) * 1.0
        losses = T.tanh(copies).mean(axis=0)
        return w, [x, width], losses


    def limited(megabytes):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        limit = used + megabytes * 2 ** 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


    theano.config.mode = "FAST_COMPILE"
    momentum = rules.momentum
    w, inputs, losses = network()
    count = theano.shared(np.zeros(1), "count")
    train = lasagne_accum.function(
        inputs, [losses.mean(), losses], losses.mean(), [w], N=2,
        update_fn=momentum, learning_rate=0.5, microbatch="auto",
        updates={count: count + 1},
    )
    rng = np.random.RandomState(0)
    small, large = rng.normal(size=(8, 2)), rng.normal(size=(128, 2))
    start = train.get_state()
    train(small, 4)
    train(small, 4)
    train.set_state(start)
"""


def run_limited(script):
    """Run a script in a process of its own; return what it prints as JSON."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc and RLIMIT_AS")
    package = os.path.dirname(os.path.dirname(lasagne_accum.__file__))
    tests = os.path.dirname(__file__)
    paths = [package, tests, os.environ.get("PYTHONPATH", "")]
    env = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(paths),
        OPENBLAS_NUM_THREADS="1",  # each thread asks for memory of its own
        OMP_NUM_THREADS="1",
    )
    script = textwrap.dedent(CHILD) + textwrap.dedent(script)
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=env,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr.decode()
    return json.loads(child.stdout.decode().splitlines()[-1])


def test_auto_halves_the_pieces_until_they_fit_and_remembers():
    said, size, counts, states, params, results, expected = run_limited(
        """
        plain, plain_inputs, plain_losses = network()
        whole = theano.function(
            plain_inputs, [plain_losses.mean(), plain_losses],
            updates=momentum(plain_losses.mean(), [plain], 0.5, 0.9),
        )
        both = np.concatenate([small, large])
        whole(both, 1)  # copies of a sample change nothing but memory
        expected = [plain.get_value().tolist()]
        loss, rows = whole(large, 1)
        expected += [float(loss), rows.tolist()]

        limited(20)
        counts, states, params = [], [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            for batch in (small, large, large):
                loss, rows = train(batch, WIDTH)
                counts.append(count.get_value().item())
                states.append([train.pending, train.updated])
                params.append(w.get_value().tolist())
        said = [
            [str(c.message), c.filename in ("<string>", "-c")]
            for c in caught
            if c.category is RuntimeWarning
        ]
        results = [float(loss), rows.tolist()]
        size = train._pieces._size
        print(json.dumps(
            [said, size, counts, states, params, results, expected]
        ))
        """
    )

    assert 1 <= size <= 32  # it halved twice or more
    assert said == [
        [
            f"`microbatch` is {size} from now on, since 128 samples at once "
            f"ran out of memory. Pass {size} to start there.",
            True,
        ]
    ]
    # What the failed pieces counted is not counted.
    pieces = -(-128 // size)
    assert counts == [1, 1 + pieces, 1 + 2 * pieces]
    # What the call before collected is not lost.
    assert states == [[1, False], [0, True], [1, False]]
    assert_array_equal(params[0], [1, 1])
    tolerance = {"rtol": 1e-12, "atol": 1e-12}
    assert_allclose(params[1], expected[0], **tolerance)
    assert_array_equal(params[2], params[1])
    assert_allclose(results[0], expected[1], **tolerance)
    assert_allclose(results[1], expected[2], **tolerance)


def test_auto_gives_up_when_one_sample_does_not_fit():
    said, error, kept, pending, counted, after = run_limited(
        """
        train(small, 4)
        before = train.get_state()
        limited(20)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            try:
                train(small, 2 ** 24)
            except MemoryError as raised:
                error = "MemoryError"
            pending = train.pending
            counted = (count.get_value() - before["count"]).item()
            state = train.get_state()
            kept = [
                name for name in state
                if np.array_equal(state[name], before[name])
            ]
            train(small, 4)
            train(small, 4)
        said = [
            str(c.message) for c in caught if c.category is RuntimeWarning
        ]
        after = [train.updated, train.pending, train._pieces._size > 2 ** 30]
        print(json.dumps([said, error, kept, pending, counted, after]))
        """
    )

    assert error == "MemoryError"
    assert said == [
        "The 1 calls that the window held are lost, since this one failed "
        "and may have been half collected. Call them again."
    ]
    assert {"w", "steps"} <= set(kept)
    assert (pending, counted) == (0, 0)
    # It goes on with whole batches: nothing was found that fits.
    assert after == [True, 0, True]


def test_a_rule_must_be_given():
    w = theano.shared(1.0, "w")
    message = (
        "`update_fn` must be an update rule, got None. Pass one, such as "
        "lasagne.updates.adam."
    )
    assert refused(TypeError, lasagne_accum.function, [], w, w, [w]) == message


@lasagne_only
def test_pieces_do_not_go_with_gradients_in_the_velocity():
    w, x = theano.shared(np.ones(2), "w"), T.dmatrix("x")
    message = (
        "`in_place` must go with whole calls, got microbatch=2. Leave one of "
        "the two out."
    )
    assert message == refused(
        ValueError,
        lasagne_accum.function,
        [x],
        None,
        x.dot(w).mean(),
        [w],
        update_fn=lasagne_accum.updates.momentum,
        learning_rate=0.1,
        microbatch=2,
        in_place=True,
    )
