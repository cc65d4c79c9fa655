"""Saved state: what it holds, and that training goes on from it."""

import copy
import pickle
from collections import OrderedDict
from types import SimpleNamespace

from lasagne_accum import function, state, with_accumulated_gradients

import numpy as np
import pytest
from backend import NumpyStreams, Streams, T, rules, theano
from numpy.testing import assert_array_equal
from test_accumulation import adam, bits, refusal, shared

pytestmark = pytest.mark.usefixtures("fast_compile")

N, CALLS = 3, 8  # two windows and two thirds of another

DTYPE_TEXT = (
    "`values` must have the shapes and dtypes that `get_state` gives here, "
    "got {}. Restore into the same network, rule and options."
)
NAME_TEXT = (
    "`values` must have the names that `get_state` gives here, got {}. "
    "Restore into the same network, rule and options."
)


def network(names=("W", "b"), update_fn=adam, streams=None, **options):
    """Make a small network, its updates and a training function.

    With random streams, the inputs are dropped out.
    """
    W = shared([[1, 2, 3], [4, 5, 6]], names[0])
    b = shared([1, 2, 3], names[1])
    x, weight = T.dmatrix(), T.dscalar()
    inputs = x
    if streams:
        inputs = x * streams.binomial(x.shape, p=0.5, dtype=x.dtype)
    loss = (T.tanh(inputs.dot(W) + b) ** 2).mean()
    if options.get("weight"):
        options["weight"] = weight
    updates = with_accumulated_gradients(loss, [W, b], N, update_fn, **options)
    train = theano.function(
        [x, weight], loss, updates=updates, on_unused_input="ignore"
    )
    return SimpleNamespace(params=[W, b], updates=updates, train=train)


def run(net, calls):
    """Train on the micro-batches of these numbers; return the losses."""
    losses = []
    for call in calls:
        x = np.random.RandomState(call).normal(size=(4, 2))
        if call == 4:
            x[0] = np.nan  # to be skipped, or not
        losses.append(net.train(x, 1.0 + call).tobytes())
    return losses


# -------------------------------------------------------------- going on


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": True},
        {"weight": True, "skip_nonfinite": True, "gate": "lazy"},
        {"accumulator_dtype": "float32"},
    ],
)
def test_training_goes_on_from_any_call(options):
    net, other = network(**options), network(**options)
    states, losses = [net.updates.get_state()], []
    for call in range(CALLS):
        losses += run(net, [call])
        states.append(net.updates.get_state())

    for offset in range(CALLS + 1):
        other.updates.set_state(states[offset])
        assert run(other, range(offset, CALLS)) == losses[offset:]
        assert bits(other.updates) == bits(net.updates)
        assert other.updates.skipped == net.updates.skipped


@pytest.mark.parametrize("gate", ["switch", "lazy"])
def test_dropout_goes_on_with_the_same_masks(gate):
    net = network(streams=Streams(1), gate=gate)
    other = network(streams=Streams(2), gate=gate)
    states, losses = [net.updates.get_state()], []
    for call in range(CALLS):
        losses += run(net, [call])
        states.append(net.updates.get_state())

    for offset in (7, 4, 0):
        other.updates.set_state(states[offset])
        assert run(other, range(offset, CALLS)) == losses[offset:]


def test_masks_of_numpy_streams_go_on_too():
    net = network(streams=NumpyStreams(1))
    other = network(streams=NumpyStreams(2))
    run(net, range(4))
    other.updates.set_state(net.updates.get_state())
    assert run(other, range(4, CALLS)) == run(net, range(4, CALLS))


def test_flush_goes_on_from_a_state():
    net, other = network(), network()
    run(net, range(2))
    other.updates.set_state(net.updates.get_state())
    assert net.updates.flush() is other.updates.flush() is True
    assert bits(other.updates) == bits(net.updates)


def test_window_of_one_has_a_state():
    W, x = shared([1, 2], "W"), T.dvector()
    updates = with_accumulated_gradients((W * x).sum(), [W], 1, adam)
    train = theano.function([x], updates=updates)
    train([1, 2])
    saved = updates.get_state()
    train([3, 4])
    after = bits(updates)
    updates.set_state(saved)
    train([3, 4])
    assert bits(updates) == after
    assert len(saved) == 4  # and Adam's t and moments


@pytest.mark.parametrize(
    "names", [("W", "W"), ("W", "file"), (None, None), ("W", "W_0")]
)
def test_state_goes_through_a_file(names, tmp_path):
    path = tmp_path / "state.npz"
    net, other = network(names), network(names)
    run(net, range(4))
    np.savez(str(path), **net.updates.get_state())
    with np.load(str(path)) as saved:
        other.updates.set_state(saved)
    assert run(other, range(4, CALLS)) == run(net, range(4, CALLS))
    assert bits(other.updates) == bits(net.updates)


# -------------------------------------------------------------- what it holds


def test_state_is_a_plain_dictionary_of_arrays():
    net = network(streams=Streams(1), skip_nonfinite=True)
    saved = net.updates.get_state()
    assert type(saved) is OrderedDict
    assert {type(name) for name in saved} == {str}
    assert {type(value) for value in saved.values()} == {np.ndarray}
    assert not any(value.dtype.hasobject for value in saved.values())


def test_state_holds_all_that_changes():
    streams = Streams(1)
    net = network(
        update_fn=lambda grads, params: rules.momentum(grads, params, 1.0),
        streams=streams,
        weight=True,
        skip_nonfinite=True,
    )
    saved = net.updates.get_state()
    # Two parameters, velocities and accumulators, the calls, weight and
    # skipped of the window, and the random stream.
    assert len(saved) == 2 + 2 + 2 + 3 + 1
    for name, variable in [("W", net.params[0]), ("b", net.params[1])]:
        assert_array_equal(saved[name], variable.get_value())
    assert {
        "W_accumulator",
        "b_accumulator",
        "window_counter",
        "window_weight",
        "window_skipped",
    } < set(saved)


def test_state_holds_a_stream_once_if_its_updates_are_in():
    streams = Streams(1)
    net = network(streams=streams)
    count = len(net.updates.get_state())
    net.updates.update((old, new) for old, new, *_ in streams.state_updates)
    assert len(net.updates.get_state()) == count


def test_state_holds_what_was_added_to_the_updates():
    net, calls = network(), shared(7, "calls")
    net.updates[calls] = calls + 1
    assert net.updates.get_state()["calls"] == 7


@pytest.mark.parametrize("form", ["dictionary", "function"])
@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_state_is_what_to_pickle_and_copy(form, copied):
    w = shared(1, "w")
    trained = with_accumulated_gradients(w**2, [w], 2, adam)
    if form == "function":
        trained = function([], None, w**2, [w], 2, adam)
    with refusal(
        TypeError,
        "`pickle` and `copy.deepcopy` must be given plain values, got an "
        f"{type(trained).__name__}. Give them what `get_state` returns, and "
        "that to `set_state` of one made anew.",
    ):
        copied(trained)
    copied(trained.get_state())


def test_state_is_a_copy():
    net = network()
    run(net, range(2))
    saved = net.updates.get_state()
    before = bits(net.updates)
    for value in saved.values():
        value[...] = -1
    assert bits(net.updates) == before

    saved = net.updates.get_state()
    kept = [value.tobytes() for value in saved.values()]
    run(net, range(2, CALLS))
    assert [value.tobytes() for value in saved.values()] == kept


def test_state_is_copied_when_it_is_set():
    net = network()
    saved = net.updates.get_state()
    net.updates.set_state(saved)
    before = bits(net.updates)
    for value in saved.values():
        value[...] = -1
    assert bits(net.updates) == before
    kept = [value.tobytes() for value in saved.values()]
    run(net, range(CALLS))
    assert [value.tobytes() for value in saved.values()] == kept


# ------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["W", "b"], ["W", "b"]),
        (["W", "b", "W"], ["W_0", "b", "W_1"]),
        ([None, None], ["unnamed_0", "unnamed_1"]),
        ([None], ["unnamed_0"]),
        (["unnamed", None], ["unnamed_0", "unnamed_1"]),
        (["", "W"], ["unnamed_0", "W"]),
        (["file"], ["file_0"]),
        (["W", "W_0", "W"], ["W_1", "W_0", "W_2"]),
        (["W", "W", "W_0"], ["W_1", "W_2", "W_0"]),
        (["W_1", "W", "W"], ["W_1", "W_0", "W_2"]),
        (["file", "file_0"], ["file_1", "file_0"]),
        (["layer/W:0", "W b"], ["layer/W:0", "W b"]),
    ],
)
def test_names_are_those_of_the_variables_made_unique(names, unique):
    assert list(state.read([shared(0, name) for name in names])) == unique


def test_values_are_in_the_order_of_the_variables():
    variables = [shared(value, "W") for value in (1, 2, 3)]
    assert list(state.read(variables).values()) == [1, 2, 3]
    state.restore(variables, {"W_2": 30.0, "W_0": 10.0, "W_1": 20.0})
    assert [float(v.get_value()) for v in variables] == [10, 20, 30]


def test_shape_may_differ_where_that_is_said():
    fixed, free = shared([1, 2], "fixed"), shared([1, 2], "free")
    longer = {"fixed": np.zeros(2), "free": np.zeros(3)}
    state.restore([fixed, free], longer, any_shape=[free])
    assert [v.get_value().size for v in (fixed, free)] == [2, 3]
    with pytest.raises(ValueError, match="'fixed'"):
        state.restore(
            [fixed, free], dict(longer, fixed=np.zeros(3)), any_shape=[free]
        )


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("b"), NAME_TEXT.format("no 'b'")),
        (
            lambda s: s.update(gamma=np.ones(2)),
            NAME_TEXT.format("the unknown 'gamma'"),
        ),
        (
            lambda s: s.update(b=np.ones(2)),
            DTYPE_TEXT.format("float64(2,) for 'b' of float64(3,)"),
        ),
        (
            lambda s: s.update(b=np.ones((1, 3))),
            DTYPE_TEXT.format("float64(1, 3) for 'b' of float64(3,)"),
        ),
        (
            lambda s: s.update(b=np.ones(3, "float32")),
            DTYPE_TEXT.format("float32(3,) for 'b' of float64(3,)"),
        ),
        (
            lambda s: s.update(window_counter=np.array(1)),
            DTYPE_TEXT.format("int64() for 'window_counter' of int8()"),
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_whole(change, text):
    net = network()
    run(net, range(2))
    saved = net.updates.get_state()
    run(net, range(2, 4))
    before = bits(net.updates)
    change(saved)
    with refusal(ValueError, text):
        net.updates.set_state(saved)
    assert bits(net.updates) == before


@pytest.mark.parametrize("name", ["window_counter", "window_weight"])
def test_window_of_fewer_than_no_calls_is_refused_whole(name):
    net = network(weight=True)
    saved = net.updates.get_state()
    run(net, range(2))
    before = bits(net.updates)
    saved[name] -= 1
    with refusal(
        ValueError,
        f"`values` must have counts and weights from 0 up, got {saved[name]} "
        f"for {name!r}. Restore what `get_state` gave.",
    ):
        net.updates.set_state(saved)
    assert bits(net.updates) == before


def test_window_of_a_bad_weight_goes_on_from_a_state():
    net, other = network(weight=True), network(weight=True)
    net.train(np.ones((4, 2)), -1)
    other.updates.set_state(net.updates.get_state())
    assert bits(other.updates) == bits(net.updates)
    assert np.isnan(other.updates.get_state()["window_weight"])


def test_state_of_another_rule_is_refused():
    net = network()
    other = network(
        update_fn=lambda grads, params: rules.sgd(grads, params, 1.0)
    )
    with pytest.raises(ValueError, match="got no 'unnamed_0'"):
        net.updates.set_state(other.updates.get_state())
    with pytest.raises(ValueError, match="got the unknown 'unnamed_0'"):
        other.updates.set_state(net.updates.get_state())


def test_empty_state_is_refused():
    net = network()
    with refusal(ValueError, NAME_TEXT.format("no 'W'")):
        net.updates.set_state({})
