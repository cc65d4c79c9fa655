"""The drop-in module: Lasagne's rules, and what this package adds."""

import functools
import importlib.util
import inspect
import pydoc
from collections import OrderedDict
from math import inf, nan

from lasagne_accum import AccumulatedUpdates, updates

import lasagne
import numpy as np
import pytest
import reference
import theano
import theano.tensor as T
from numpy.testing import assert_allclose, assert_array_equal
from test_accumulation import bits, linear, refusal, shared
from test_equivalence import (
    RULES,
    assert_close,
    every_rule,
    hyper,
    regression,
    restore,
    rule_variables,
    start,
    train_windows,
    values,
    windows,
)

pytestmark = pytest.mark.usefixtures("fast_compile")

OPTIONS = {
    "average": 1,
    "grads_clip": False,
    "noise": False,
    "weight": None,
    "gate": "switch",
    "skip_nonfinite": False,
    "accumulator_dtype": None,
}

APPLY = {
    "classical": ("apply_momentum", "momentum"),
    "nesterov": ("apply_nesterov_momentum", "nesterov_momentum"),
}

both_momenta = pytest.mark.parametrize("kind", sorted(APPLY))

sgd = functools.partial(updates.sgd, learning_rate=1.0)


@pytest.fixture
def seeded(monkeypatch):
    """Return a function that seeds Lasagne's random generator."""
    monkeypatch.setattr(lasagne.random, "_rng", np.random)
    return lambda seed: lasagne.random.set_rng(np.random.RandomState(seed))


def call_gradients(param, calls, **options):
    """List by how much each call moves a parameter, gradients reversed."""
    (grad,), loss = linear([param])
    train = theano.function([grad], updates=sgd(loss, [param], **options))
    steps = []
    for value in calls:
        before = param.get_value()
        train(np.array(value, param.dtype))
        steps.append(before - param.get_value())
    return steps


# ------------------------------------------------------------- the names


def test_all_names_of_lasagne_are_there():
    names = {*lasagne.updates.__all__, "adamax", "amsgrad"}
    assert set(updates.__all__) == names
    assert len(updates.__all__) == len(names)
    assert all(callable(getattr(updates, name)) for name in names)


def test_every_rule_is_named_as_in_lasagne():
    for name in RULES:
        rule = getattr(updates, name)
        assert (rule.__name__, rule.__qualname__) == (name, name)
        assert rule.__module__ == "lasagne_accum.updates"


@pytest.mark.parametrize("name", sorted(lasagne.updates.__all__))
def test_signature_begins_as_that_of_lasagne(name):
    ours = inspect.signature(getattr(updates, name)).parameters.values()
    theirs = inspect.signature(getattr(lasagne.updates, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs.values())


@pytest.mark.parametrize("name", ["adamax", "amsgrad"])
def test_signature_of_the_added_rules_has_the_defaults_of_the_papers(name):
    parameters = inspect.signature(getattr(updates, name)).parameters
    _, defaults = reference.RULES[name]
    names = ["loss_or_grads", "params", *defaults]
    assert list(parameters)[: len(names)] == names
    assert {key: parameters[key].default for key in defaults} == defaults


@every_rule
def test_options_follow_by_keyword_only(name):
    parameters = inspect.signature(getattr(updates, name)).parameters
    assert (
        OPTIONS.items()
        <= {
            key: parameter.default for key, parameter in parameters.items()
        }.items()
    )
    assert {parameters[key].kind for key in OPTIONS} == {
        inspect.Parameter.KEYWORD_ONLY
    }


@every_rule
def test_help_shows_and_explains_the_options(name):
    text = pydoc.plain(pydoc.render_doc(getattr(updates, name)))
    signature = str(inspect.signature(getattr(updates, name)))
    assert f"{name}{signature}" in text
    assert "learning_rate" in signature
    assert "average=1, grads_clip=False, noise=False" in signature
    described = text[text.index("Parameters") : text.index("Returns\n")]
    for option in ("average", "grads_clip", "noise"):
        assert f"    {option} : " in described
    others = "weight, gate, skip_nonfinite, accumulator_dtype, statistics : "
    assert others in described
    assert text.count("average : ") == 1


@pytest.mark.parametrize("name", ["norm_constraint", "total_norm_constraint"])
def test_constraints_are_those_of_lasagne(name):
    assert getattr(updates, name) is getattr(lasagne.updates, name)


# ----------------------------------------------------------------- the rules


@every_rule
def test_without_options_every_bit_is_that_of_lasagne(name, floatX):
    params, inputs, loss = regression(floatX)
    trained = []
    for rule in (getattr(updates, name), RULES[name]):
        restore(params, start(floatX))
        made = rule(loss, params, **hyper(name))
        train_windows(theano.function(inputs, updates=made), 3, floatX)
        trained.append(bits(made))
    assert trained[0] == trained[1]


@pytest.mark.parametrize("name", ["adamax", "amsgrad"])
@pytest.mark.parametrize("options", [{}, {"learning_rate": 0.25}])
def test_added_rules_equal_the_reference(name, floatX, options):
    value = np.array([1.0, -2.0])
    param = shared(value, dtype=floatX)
    (grad,), loss = linear([param])
    made = getattr(updates, name)(loss, [param], **options)
    train = theano.function([grad], updates=made)
    rule, defaults = reference.RULES[name]

    state = {}
    for g in [(1, 3), (0.5, -2), (-4, 0)]:
        train(g)
        rule([value], [np.array(g)], state, **dict(defaults, **options))
    # 1 - 0.999 is rounded to 1 part in 2**14 of float32, of which adamax
    # sees nothing, and amsgrad the root in both of its factors.
    assert_close([param.get_value()], [value], floatX)


@pytest.mark.parametrize("name", ["adamax", "amsgrad"])
def test_added_rules_are_those_of_lasagne_if_it_has_them(name, monkeypatch):
    def newer(loss_or_grads, params, learning_rate=7):
        """Updates of a newer Lasagne."""
        return OrderedDict((p, p - learning_rate) for p in params)

    newer.__name__ = name
    monkeypatch.setattr(lasagne.updates, name, newer, raising=False)
    spec = importlib.util.spec_from_file_location(
        "lasagne_accum.updates_again", updates.__file__
    )
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)

    w = shared(10, "w")
    made = getattr(again, name)(w**2, [w])
    theano.function([], updates=made)()
    assert w.get_value() == 3
    assert getattr(again, name).__doc__ == newer.__doc__


@every_rule
def test_average_is_the_window_of_the_rule(name, floatX):
    params, inputs, loss = regression(floatX)
    made = getattr(updates, name)(loss, params, average=3, **hyper(name))
    assert isinstance(made, AccumulatedUpdates)
    train_windows(theano.function(inputs, updates=made), 3, floatX)
    trained = values(rule_variables(made))

    restore(params, start(floatX))
    made = RULES[name](loss, params, **hyper(name))
    train = theano.function(inputs, updates=made)
    for x, y in windows(3, floatX):
        train(x.reshape(-1, 3), y.reshape(-1, 2))
    assert_close(trained, values(rule_variables(made)), floatX)


def test_arguments_of_the_rule_may_be_positional():
    w = shared(10, "w")
    made = updates.momentum(2 * w, [w], 0.5, 0.75, average=2)
    train = theano.function([], updates=made)
    path = []
    for _ in range(4):
        train()
        path.append(float(w.get_value()))
    assert path == [10, 9, 9, 7.25]


def test_average_may_be_a_shared_variable():
    N, w = theano.shared(3), shared(10, "w")
    (g,), loss = linear([w])
    made = sgd(loss, [w], average=N)
    train = theano.function([g], made.updated, updates=made)
    updated = [bool(train(value)) for value in (1, 2, 3)]
    N.set_value(1)
    updated.append(bool(train(4)))
    assert (updated, float(w.get_value())) == ([False, False, True, True], 4)


# --------------------------------------------------------------- the options


def test_weight_reaches_the_window():
    w, x = shared(10, "w"), T.dvector()
    made = sgd((w * x).mean(), [w], average=2, weight=x.shape[0])
    train = theano.function([x], updates=made)
    train([2])
    train([6, 6, 6])
    assert w.get_value() == 5


def test_skip_nonfinite_reaches_the_window():
    w = shared(10, "w")
    made = sgd(w * nan, [w], skip_nonfinite=True)
    theano.function([], updates=made)()
    assert (w.get_value(), made.skipped) == (10, 1)


def test_accumulator_dtype_reaches_the_window():
    w = shared(10, "w")
    made = sgd(w, [w], average=2, accumulator_dtype="float32")
    assert made.accumulators[0].dtype == "float32"


@pytest.mark.parametrize(("gate", "lazy"), [("switch", 0), ("lazy", 1)])
def test_gate_reaches_the_window(gate, lazy):
    w = shared(10, "w")
    train = theano.function([], updates=sgd(w, [w], average=2, gate=gate))
    ops = [str(node.op) for node in train.maker.fgraph.apply_nodes]
    assert sum("if{" in op for op in ops) == lazy


@pytest.mark.parametrize(
    ("grads_clip", "mean"),
    # The gradients are 4 and 0.5, -3 and 9.
    [(True, (0, 0.75)), (1, (0, 0.75)), (2.0, (0, 1.25)), (5, (0.5, 2.75))],
)
def test_gradients_are_clipped_before_they_are_averaged(
    grads_clip, mean, floatX, gate
):
    param = shared([0, 0], dtype=floatX)
    steps = call_gradients(
        param,
        [[4, 0.5], [-3, 9]],
        average=2,
        grads_clip=grads_clip,
        gate=gate,
    )
    assert_array_equal(steps, [(0, 0), mean])


def test_gradients_are_clipped_without_a_window_too():
    steps = call_gradients(shared([0, 0]), [[4, -0.5]], grads_clip=True)
    assert_array_equal(steps, [[1, -0.5]])


def test_given_gradients_are_clipped_and_the_list_is_not_changed():
    w, grad = shared(0, "w"), T.dscalar()
    grads = [grad]
    train = theano.function([grad], updates=sgd(grads, [w], grads_clip=True))
    train(5)
    assert w.get_value() == -1
    assert grads == [grad]


@pytest.mark.parametrize(
    ("noise", "std"), [(True, 1e-8), (0.5, 0.5), (3, 3.0)]
)
def test_noise_has_the_standard_deviation_asked_for(noise, std, seeded):
    seeded(1)
    (step,) = call_gradients(
        shared(np.zeros(10000)), [np.zeros(10000)], noise=noise
    )
    # Five standard errors: of the mean, and of the standard deviation.
    assert abs(step.mean()) < 5 * std / 100
    assert abs(step.std() - std) < 5 * std / 100 / np.sqrt(2)


def test_noise_is_gaussian(seeded):
    seeded(1)
    (step,) = call_gradients(
        shared(np.zeros(10000)), [np.zeros(10000)], noise=1.0
    )
    # 68.27 % within one deviation, 95.45 % within two; give or take five
    # standard errors.
    within = [(abs(step) < limit).mean() for limit in (1, 2)]
    assert_allclose(within, [0.6827, 0.9545], atol=5 * 0.0047)


def test_noise_is_repeated_by_the_same_seed_alone(seeded):
    runs = []
    for seed in (1, 1, 2):
        seeded(seed)
        runs.append(
            call_gradients(shared([0, 0]), [[0, 0]] * 3, noise=0.5, average=2)
        )
    assert_array_equal(runs[0], runs[1])
    assert (runs[0][1] != runs[2][1]).all()


def test_noise_differs_from_call_to_call_and_element_to_element(seeded):
    seeded(1)
    steps = call_gradients(shared(np.zeros(3)), [np.zeros(3)] * 3, noise=0.5)
    assert len(np.unique(steps)) == 9


def test_noise_differs_between_parameters(seeded):
    seeded(1)
    params = [shared([0, 0, 0]), shared([0, 0, 0])]
    grads, loss = linear(params)
    train = theano.function(grads, updates=sgd(loss, params, noise=0.5))
    train(np.zeros(3), np.zeros(3))
    assert len(np.unique(values(params))) == 6


def test_noise_is_drawn_for_each_call_of_a_window(seeded):
    seeded(1)
    param = shared(np.zeros(10000))
    steps = call_gradients(param, [np.zeros(10000)] * 4, noise=1.0, average=4)
    # The mean of four draws has half their deviation; one draw for all four
    # calls would keep it.
    assert not np.any(steps[:3])
    assert abs(steps[3].std() - 0.5) < 5 * 0.5 / 100 / np.sqrt(2)


def test_noise_is_added_after_clipping(seeded):
    seeded(1)
    (step,) = call_gradients(
        shared(np.zeros(1000)),
        [np.full(1000, 9.0)],
        grads_clip=1.0,
        noise=0.5,
    )
    assert (step > 1).any()
    assert abs(step.mean() - 1) < 5 * 0.5 / np.sqrt(1000)


@pytest.mark.parametrize(
    ("shape", "broadcastable"),
    [
        ((), ()),
        ((1,), (True,)),
        ((1, 3), (True, False)),
        ((3, 1), (False, True)),
        ((0, 2), (False, False)),
        ((2, 3), (False, False)),
    ],
)
def test_noise_fits_parameters_of_any_shape(shape, broadcastable, floatX):
    param = shared(np.zeros(shape), None, floatX, broadcastable)
    steps = call_gradients(param, [np.zeros(shape)] * 2, noise=0.5, average=2)
    assert not np.any(steps[0])
    assert np.all(steps[1])
    assert steps[1].shape == shape


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("grads_clip", 0, ValueError),
        ("grads_clip", -1.5, ValueError),
        ("grads_clip", nan, ValueError),
        ("grads_clip", None, TypeError),
        ("grads_clip", (-1, 1), TypeError),
        ("noise", 0.0, ValueError),
        ("noise", -1, ValueError),
        ("noise", inf, ValueError),
        ("noise", "1", TypeError),
    ],
)
def test_wrong_amount_is_refused(name, value, error):
    w = shared(1, "w")
    default = {"grads_clip": "1", "noise": "1e-08"}[name]
    with refusal(
        error,
        f"`{name}` must be True, False or a positive number, got {value!r}. "
        f"Pass True for {default}, or leave it out.",
    ):
        updates.sgd(w**2, [w], 1.0, **{name: value})


def test_wrong_average_is_refused():
    w = shared(1, "w")
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        updates.sgd(w**2, [w], 1.0, average=0)


def test_unknown_option_is_refused():
    w = shared(1, "w")
    with pytest.raises(TypeError, match="avrage"):
        updates.sgd(w**2, [w], 1.0, avrage=2)


def test_same_errors_with_options_as_without():
    w = shared(1, "w")
    with refusal(
        ValueError,
        "`params` must contain each variable once, got w as elements 0 and "
        "1. Pass it once.",
    ):
        updates.sgd(w**2, [w, w], 1.0, noise=True)


# -------------------------------------------------------- momentum on updates


@both_momenta
@pytest.mark.parametrize("chosen", [None, "first", "all"])
def test_momentum_on_a_window_equals_lasagne_on_the_whole_batch(
    kind, chosen, floatX, gate
):
    params, inputs, loss = regression(floatX)
    momentum_params = {None: None, "first": params[:1], "all": params}[chosen]
    apply = APPLY[kind][0]
    made = updates.sgd(loss, params, 0.0625, average=5, gate=gate)
    made = getattr(updates, apply)(made, momentum_params, momentum=0.75)
    assert isinstance(made, AccumulatedUpdates)
    train_windows(theano.function(inputs, updates=made), 5, floatX)
    trained = values(rule_variables(made))

    restore(params, start(floatX))
    plain = lasagne.updates.sgd(loss, params, 0.0625)
    plain = getattr(lasagne.updates, apply)(
        plain, momentum_params, momentum=0.75
    )
    train = theano.function(inputs, updates=plain)
    for x, y in windows(5, floatX):
        train(x.reshape(-1, 3), y.reshape(-1, 2))
    assert_close(trained, values(plain), floatX)


@both_momenta
def test_momentum_on_adam_leaves_every_bit_between_boundaries(kind, gate):
    params = [shared([1, -0.0]), shared(2)]
    grads, loss = linear(params)
    made = updates.adam(loss, params, learning_rate=0.5, average=3, gate=gate)
    made = getattr(updates, APPLY[kind][0])(made, momentum=0.75)
    train = theano.function(grads, made.updated, updates=made)
    variables = rule_variables(made)
    # Adam's t, two moments for each parameter, a velocity for each of all.
    assert len(variables) == 2 * (1 + 2 * 3)

    updated = []
    for call in range(6):
        before = bits(variables)
        updated.append(bool(train([1 + call, -2], 3)))
        moved = [a != b for a, b in zip(bits(variables), before)]
        assert any(moved) is updated[-1]
        assert all(moved[variables.index(p)] for p in params) is updated[-1]
    assert updated == [False, False, True] * 2


@both_momenta
def test_momentum_on_plain_updates_is_that_of_lasagne(kind, floatX):
    params, inputs, loss = regression(floatX)
    trained = []
    for module in (updates, lasagne.updates):
        restore(params, start(floatX))
        apply = getattr(module, APPLY[kind][0])
        plain = lasagne.updates.sgd(loss, params, 0.0625)
        made = apply(plain, params[:1], 0.75)
        assert type(made) is OrderedDict
        assert list(plain) == params
        train_windows(theano.function(inputs, updates=made), 3, floatX)
        trained.append(bits(made))
    assert trained[0] == trained[1]


@both_momenta
def test_momentum_on_a_window_of_one_is_that_of_lasagne(kind, floatX):
    params, inputs, loss = regression(floatX)
    trained = []
    for module in (updates, lasagne.updates):
        restore(params, start(floatX))
        made = getattr(module, APPLY[kind][0])(
            module.sgd(loss, params, 0.0625), momentum=0.75
        )
        train_windows(theano.function(inputs, updates=made), 3, floatX)
        trained.append(bits(made))
    assert trained[0] == trained[1]


@both_momenta
def test_momentum_defaults_are_those_of_lasagne(kind):
    v, w = shared(10, "v"), shared(10, "w")
    for module, param in [(updates, v), (lasagne.updates, w)]:
        made = getattr(module, APPLY[kind][0])(module.sgd(param, [param], 1.0))
        train = theano.function([], updates=made)
        train()
        train()
    assert v.get_value() == w.get_value() < 8


@both_momenta
def test_momentum_leaves_the_updates_it_is_put_on(kind):
    w = shared(10, "w")
    made = sgd(2 * w, [w], average=2)
    before = list(made.items())
    getattr(updates, APPLY[kind][0])(made)
    assert list(made.items()) == before


@both_momenta
def test_momentum_shares_the_window_it_is_put_on(kind):
    w = shared(10, "w")
    made = sgd(2 * w, [w], average=2)
    on_top = getattr(updates, APPLY[kind][0])(made)
    assert on_top.counter is made.counter
    assert on_top.accumulators == made.accumulators


@both_momenta
def test_momentum_keeps_weights_and_skipping(kind):
    w, weight = shared(10, "w"), T.dscalar()
    (g,), loss = linear([w])
    made = sgd(loss, [w], average=2, weight=weight, skip_nonfinite=True)
    made = getattr(updates, APPLY[kind][0])(made, momentum=0.0)
    train = theano.function([g, weight], made.updated, updates=made)
    calls = [(2, 1), (nan, 1), (6, 3)]
    assert [bool(train(*call)) for call in calls] == [False, False, True]
    assert (float(w.get_value()), made.skipped) == (
        {"classical": 5, "nesterov": 5}[kind],
        1,
    )


@both_momenta
def test_momentum_is_flushed(kind):
    w = shared(10, "w")
    made = getattr(updates, APPLY[kind][0])(
        sgd(2 * w, [w], average=3), momentum=0.5
    )
    train = theano.function([], updates=made)
    train()
    assert made.flush() is True
    first = {"classical": 8, "nesterov": 7}[kind]
    assert w.get_value() == first
    for _ in range(3):
        train()
    # The velocity is -2, then -1 - 2.
    second = {"classical": 3, "nesterov": 3.5}[kind]
    assert w.get_value() == first - second


@both_momenta
def test_momentum_keeps_what_was_added(kind):
    w, calls = shared(10, "w"), shared(0)
    made = sgd(2 * w, [w], average=2)
    made[calls] = calls + 1
    made = getattr(updates, APPLY[kind][0])(made)
    theano.function([], updates=made)()
    assert (w.get_value(), calls.get_value()) == (10, 1)


@both_momenta
@pytest.mark.parametrize("changed", ["w", "window_counter"])
def test_momentum_refuses_updates_that_were_changed(kind, changed):
    w = shared(10, "w")
    made = sgd(2 * w, [w], average=2)
    (variable,) = (v for v in made if v.name == changed)
    made[variable] = variable * 1
    with refusal(
        ValueError,
        "`updates` must be as `with_accumulated_gradients` made them, got "
        f"another update of {changed}. Change it inside the update rule "
        "instead.",
    ):
        getattr(updates, APPLY[kind][0])(made)


@both_momenta
def test_momentum_refuses_updates_that_were_removed(kind):
    w = shared(10, "w")
    made = sgd(2 * w, [w], average=2)
    del made[w]
    with pytest.raises(ValueError, match="another update of w"):
        getattr(updates, APPLY[kind][0])(made)


# --------------------------------------------------- momentum in place


def in_place(calls, **options):
    """Build momentum in place; return it and the path of its parameter `w`."""
    w = shared(10, "w")
    (g,), loss = linear([w])
    options = {"learning_rate": 1.0, "momentum": 0.5, **options}
    made = updates.momentum(loss, [w], in_place=True, **options)
    train = theano.function([g], made.updated, updates=made)
    path = [(bool(train(g)), float(w.get_value())) for g in calls]
    return made, path


def test_in_place_is_an_option_of_momentum_alone():
    for name in RULES:
        parameters = inspect.signature(getattr(updates, name)).parameters
        assert ("in_place" in parameters) is (name == "momentum")
    parameter = inspect.signature(updates.momentum).parameters["in_place"]
    assert (parameter.default, parameter.kind) == (
        False,
        inspect.Parameter.KEYWORD_ONLY,
    )
    assert "in_place : bool" in updates.momentum.__doc__
    assert "in_place" not in updates.adam.__doc__


def test_in_place_refuses_other_rules():
    w = shared(1, "w")
    with pytest.raises(TypeError, match="in_place"):
        updates.sgd(w**2, [w], 1.0, in_place=True)


@pytest.mark.parametrize("N", [1, 2, 5, 128])
def test_momentum_in_place_equals_lasagne_on_the_whole_batch(N, floatX, gate):
    params, inputs, loss = regression(floatX)
    made = updates.momentum(
        loss, params, 0.0625, 0.75, average=N, in_place=True, gate=gate
    )
    train_windows(theano.function(inputs, updates=made), N, floatX)
    velocities = [v for v in made if v not in params and v is not made.counter]
    trained = values([*params, *velocities])

    restore(params, start(floatX))
    plain = lasagne.updates.momentum(loss, params, 0.0625, 0.75)
    train = theano.function(inputs, updates=plain)
    for x, y in windows(N, floatX):
        train(x.reshape(-1, 3), y.reshape(-1, 2))
    velocities = [v for v in plain if v not in params]
    assert_close(trained, values([*params, *velocities]), floatX)


def test_momentum_in_place_moves_parameters_at_boundaries_only(gate):
    _, path = in_place([1, 3, 2, 6], average=2, gate=gate)
    # The velocity is -2, then -1 - 4.
    assert path == [(False, 10), (True, 8), (False, 8), (True, 3)]


def test_momentum_in_place_takes_no_memory_but_the_counter():
    made, _ = in_place([], average=2)
    assert made.accumulators == []
    assert [(v.name, v.dtype) for v in made] == [
        ("w", "float64"),
        ("w_velocity", "float64"),
        ("window_counter", "int8"),
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_momentum_in_place_takes_gradients_of_a_wider_dtype(dtype, gate):
    w, g = shared([4, 8], "w", dtype), T.dvector()
    made = updates.momentum(
        [g], [w], 1.0, 0.5, average=2, in_place=True, gate=gate
    )
    train = theano.function([g], updates=made)
    for _ in range(4):  # the velocity is -1, then -0.5 - 1
        train([1, 1])
    assert_array_equal(w.get_value(), [1.5, 5.5])


def test_momentum_in_place_clips_each_gradient():
    _, path = in_place([4, -0.5], average=2, grads_clip=True)
    assert path[-1] == (True, 9.75)


def test_momentum_in_place_uses_the_learning_rate_of_each_call():
    w, rate = shared(10, "w"), shared(1)
    made = updates.momentum(w, [w], rate, average=2, in_place=True)
    train = theano.function([], updates=made)
    train()
    rate.set_value(3)
    train()
    assert w.get_value() == 8


def test_momentum_in_place_can_be_saved_within_a_window():
    made, _ = in_place([1, 3, 2], average=2)
    saved = made.get_state()
    other, _ = in_place([7], average=2)
    other.set_state(saved)
    assert bits(other) == bits(made)


def test_momentum_in_place_refuses_to_flush():
    made, _ = in_place([1, 3], average=2)
    assert made.flush() is False
    made, _ = in_place([1], average=2)
    before = bits(made)
    with refusal(
        ValueError,
        "`flush` must find the gradients apart from the momentum, got "
        "updates with `in_place=True`. Complete the window, or leave "
        "`in_place` out.",
    ):
        made.flush()
    assert bits(made) == before


def test_reset_of_momentum_in_place_empties_the_velocity():
    made, _ = in_place([1, 3, 2], average=2)
    made.reset()
    assert {v.name: float(v.get_value()) for v in made} == {
        "w": 8,
        "w_velocity": 0,
        "window_counter": 0,
    }


@pytest.mark.parametrize(
    ("option", "got"),
    [
        ({"weight": 2}, "weight=2"),
        ({"skip_nonfinite": True}, "skip_nonfinite=True"),
        ({"accumulator_dtype": "float64"}, "accumulator_dtype='float64'"),
    ],
)
def test_momentum_in_place_refuses_other_sums(option, got):
    with refusal(
        ValueError,
        "`in_place` must go with equal weights in the parameters' dtype, got "
        f"{got}. Leave one of the two out.",
    ):
        in_place([], average=2, **option)


def test_momentum_in_place_refuses_a_symbolic_N():
    with refusal(
        ValueError,
        "`in_place` must go with an int for N, got steps. Leave `in_place` "
        "out.",
    ):
        in_place([], average=theano.shared(2, "steps"))


def test_momentum_in_place_refuses_an_unknown_gate():
    with refusal(
        ValueError,
        '`gate` must be "switch" or "lazy", got \'no\'. Leave it out for '
        '"switch", which works everywhere.',
    ):
        in_place([], average=2, gate="no")


def test_momentum_in_place_refuses_wrong_averages():
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        in_place([], average=0)
