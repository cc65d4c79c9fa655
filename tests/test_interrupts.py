"""Calls that fail or are interrupted leave a state to go on from."""

import contextlib
import os
import signal
import threading
import warnings
import weakref

import lasagne_accum

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from numpy.testing import assert_allclose, assert_array_equal

pytestmark = pytest.mark.usefixtures("fast_compile")

# Only the optimized graph works in place, and so can be left half written.
# Theano's C code is not needed for that.
IN_PLACE = theano.Mode(
    linker=theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False),
    optimizer="fast_run",
)


compiled = pytest.mark.compiled


@pytest.fixture(
    params=["as_written", "in_place", pytest.param("in_C", marks=compiled)]
)
def mode(request):
    """Run as written, in place, and in place in C."""
    if request.param == "in_C":
        request.getfixturevalue("in_c")
        return "FAST_RUN"
    return IN_PLACE if request.param == "in_place" else "FAST_COMPILE"


LOST = (
    "The {} calls that the window held are lost, since this one failed and "
    "may have been half collected. Call them again."
)


WATCHERS = {}


class Spy(theano.Op):
    """Pass a value on, after showing it to what watches its place."""

    __props__ = ("place",)

    def __init__(self, place):
        self.place = place

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        WATCHERS.get(self.place, lambda value: None)(inputs[0])
        outputs[0][0] = inputs[0].copy()

    def grad(self, inputs, grads):
        return [Spy(f"{self.place} backwards")(grads[0])]

    def infer_shape(self, node, shapes):
        return shapes


@contextlib.contextmanager
def watching(place, what):
    """Call `what` with each value that passes a place."""
    WATCHERS[place] = what
    try:
        yield
    finally:
        del WATCHERS[place]


class Boom(Exception):
    """What no other code raises."""


def failing(place, error=Boom, when=lambda value: True):
    """Fail at a place."""

    def fail(value):
        if when(value):
            raise error("on demand")

    return watching(place, fail)


# Where a call is before, amid and after adding gradients.
PLACES = ("a", "b", "a backwards", "b backwards", "output")


def network():
    """Make two layers with a spy on each: parameters, input, outputs, loss."""
    w, v = theano.shared(np.full(2, 0.5), "w"), theano.shared(0.25, "v")
    x = T.dmatrix("x")
    hidden = Spy("a")(x * w)
    errors = (Spy("b")(hidden.sum(axis=1) * v) - 1) ** 2
    return [w, v], x, Spy("output")(errors), errors.mean()


def momentum_with_spies(grads, params, learning_rate):
    """Put a spy on each gradient that momentum gets."""
    spied = [Spy(f"rule {i}")(grad) for i, grad in enumerate(grads)]
    return lasagne.updates.momentum(spied, params, learning_rate, 0.5)


def trainer(N=3, mode=None, rule=momentum_with_spies, **kw):
    params, x, outputs, loss = network()
    return lasagne_accum.function(
        [x], outputs, loss, params,
        N=N, update_fn=rule, learning_rate=0.125, mode=mode, **kw,
    )  # fmt: skip


BATCH = np.array([[1.0, 2.0], [3.0, -4.0], [0.5, 1.0], [2.0, 2.0]])


def assert_same_state(one, other):
    assert list(one) == list(other)
    for name in one:
        assert_array_equal(one[name], other[name], err_msg=name)


def fails(train, *args, error=Boom, **kw):
    """Call, see it fail, and return the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with pytest.raises(error):
            train(*args, **kw)
    return texts(caught)


def texts(caught):
    """Return the texts of the package's own warnings, all from here."""
    ours = [w for w in caught if w.category is RuntimeWarning]
    assert all(w.filename == __file__ for w in ours)
    return [str(w.message) for w in ours]


# -- A call that raises ---------------------------------------------------


def test_a_call_that_raises_leaves_the_window_empty_and_nothing_else(mode):
    train = trainer(N=3, mode=mode)
    for _ in range(3):
        train(BATCH)
    before = train.get_state()

    for place in PLACES:
        for error in (Boom, MemoryError):
            for lost in (0, 1, 2):
                for _ in range(lost):
                    train(BATCH)
                with failing(place, error):
                    said = fails(train, BATCH, error=error)
                assert said == ([LOST.format(lost)] if lost else [])
                assert (train.pending, train.updated) == (0, False)
                assert_same_state(train.get_state(), before)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_leaves_the_window_empty_too(error):
    train = trainer(N=3)
    before = train.get_state()
    train(BATCH)

    with failing("b backwards", error):
        assert fails(train, BATCH, error=error) == [LOST.format(1)]

    assert (train.pending, train.updated) == (0, False)
    assert_same_state(train.get_state(), before)


def test_training_goes_on_as_from_an_empty_window(mode):
    train = trainer(N=2, mode=mode)
    start = train.get_state()
    for k in range(4):
        train(BATCH + k)
    expected = train.get_state()

    for place in PLACES:
        train.set_state(start)
        train(BATCH)
        train(BATCH + 1)
        train(BATCH + 50)
        with failing(place):
            assert fails(train, BATCH + 70) == [LOST.format(1)]
        train(BATCH + 2)
        train(BATCH + 3)
        assert_same_state(train.get_state(), expected)


def test_the_places_are_before_amid_and_after_the_sums():
    train, seen = trainer(N=3, mode=IN_PLACE), set()
    sums = train._window.held.sums

    def look(value):
        values = [variable.get_value() for variable in sums]
        seen.add(tuple((value == 0).all() for value in values))

    with contextlib.ExitStack() as stack:
        for place in PLACES:
            stack.enter_context(watching(place, look))
        train(BATCH)

    assert (True, True) in seen
    assert len(seen) > 1  # else the tests above prove little


def test_a_bad_shape_inside_the_graph_is_like_any_failure():
    train = trainer(N=3)
    before = train.get_state()
    train(BATCH)
    assert fails(train, np.ones((2, 3)), error=ValueError) == [LOST.format(1)]
    assert fails(train, np.ones((2, 3)), error=ValueError) == []
    assert_same_state(train.get_state(), before)


def test_a_rule_that_raises_leaves_the_window_empty():
    train = trainer(N=2)
    before = train.get_state()

    for place in ("rule 0", "rule 1"):
        train(BATCH)
        with failing(place):
            assert fails(train, BATCH) == [LOST.format(1)]
        assert (train.pending, train.updated) == (0, False)
        assert_same_state(train.get_state(), before)

        train(BATCH)
        with failing(place):
            assert fails(train.flush) == [LOST.format(1)]
        assert (train.pending, train.updated) == (0, False)
        assert_same_state(train.get_state(), before)


@pytest.mark.parametrize("microbatch", [None, 2])
def test_wrong_arguments_leave_the_window_as_it_was(microbatch):
    train = trainer(N=3, microbatch=microbatch)
    train(BATCH)
    train(BATCH)
    before = train.get_state()

    for args, kw in [
        (["text"], {}),
        ([None], {}),
        ([object()], {}),
        ([BATCH.astype(complex)], {}),
        ([BATCH[0]], {}),
        ([BATCH[None]], {}),
        ([[[1, 2], [3]]], {}),
        ([], {"x": BATCH[0]}),
        ([BATCH, BATCH], {}),
        ([BATCH], {"x": BATCH}),
        ([BATCH], {"unknown": BATCH}),
        ([], {"unknown": BATCH}),
    ]:
        assert fails(train, *args, error=TypeError, **kw) == [], (args, kw)
        assert_same_state(train.get_state(), before)
    assert fails(train, error=(TypeError, ValueError)) == []
    assert_same_state(train.get_state(), before)

    train(BATCH)
    assert train.updated


def test_what_is_wrong_with_an_argument_is_said():
    train = trainer(N=3)
    for args, kw, key in (([BATCH[0]], {}, "0"), ([], {"x": BATCH[0]}, "'x'")):
        with pytest.raises(TypeError) as caught:
            train(*args, **kw)
        assert str(caught.value) == (
            f"Input {key} must be of TensorType(float64, matrix), got a value "
            "that is not: Wrong number of dimensions: expected 2, got 1 with "
            "shape (2,)."
        )


# -- Pieces ---------------------------------------------------------------


def at_call(number):
    """Say when a spy is called for the nth time."""
    calls = []
    return lambda value: calls.append(value) or len(calls) == number


def test_a_piece_that_raises_takes_the_window_with_it(mode):
    train = trainer(N=3, mode=mode, microbatch=1)
    before = train.get_state()

    for place in PLACES:
        for number in (1, 2, 4):
            for lost in (0, 1, 2):
                for _ in range(lost):
                    train(BATCH)
                with failing(place, when=at_call(number)):
                    said = fails(train, BATCH)
                assert said == ([LOST.format(lost)] if lost else [])
                assert_same_state(train.get_state(), before)


def auto(mode=None, N=2, **kw):
    """Compile a trainer that halves, and counts its pieces."""
    count = theano.shared(np.zeros(1), "count")
    train = trainer(
        N, mode, microbatch="auto", updates={count: count + 1}, **kw
    )
    return train, count


SIZE = (
    "`microbatch` is {} from now on, since {} samples at once ran out of "
    "memory. Pass {} to start there."
)


@pytest.mark.parametrize("place", PLACES)
def test_halving_forgets_what_failed_and_keeps_what_was_collected(mode, place):
    train, count = auto(mode)
    start = train.get_state()
    train(BATCH[:1] + 1)
    train(BATCH)
    expected = train.get_state()

    # 4 samples fail; the first two pass, the others fail; one by one, all do.
    train.set_state(start)
    train(BATCH[:1] + 1)
    sizes = []

    def full(value):
        sizes.append(np.shape(value)[:1])
        if len(sizes) in (1, 3):
            raise MemoryError

    with watching(place, full), pytest.warns(RuntimeWarning) as caught:
        output = train(BATCH)

    assert texts(caught) == [SIZE.format(1, 4, 1)]
    assert len(sizes) == 7
    assert len(output) == 4
    assert (train.pending, train.updated, train.steps) == (0, True, 1)
    assert count.get_value() == 1 + 4
    for name, value in train.get_state().items():
        if name != "count":
            assert_allclose(value, expected[name], rtol=1e-14, err_msg=name)


def test_the_size_that_worked_is_remembered():
    train, count = auto()
    with failing("a", MemoryError, lambda value: len(value) > 2):
        with pytest.warns(RuntimeWarning) as caught:
            train(BATCH)
        assert texts(caught) == [SIZE.format(2, 4, 2)]
        train(BATCH)
    assert count.get_value() == 4
    train(np.concatenate([BATCH, BATCH[:1]]))
    assert count.get_value() == 7


def test_halving_an_odd_batch_leaves_no_sample_out():
    train, count = auto()
    batch = np.concatenate([BATCH, BATCH[:1]])
    too_many = failing("a", MemoryError, lambda value: len(value) > 3)
    with too_many, pytest.warns(RuntimeWarning) as caught:
        assert len(train(batch)) == 5
    assert texts(caught) == [SIZE.format(3, 5, 3)]
    assert count.get_value() == 2


def test_a_failed_piece_gives_its_memory_back_before_the_next_try(mode):
    w, x = theano.shared(np.ones(2)), T.dmatrix("x")
    hidden = Spy("start")(x) * w
    loss = Spy("end")(Spy("middle")(hidden) * hidden).mean()
    train = lasagne_accum.function(
        [x], None, loss, [w],
        update_fn=lasagne.updates.sgd, learning_rate=0.5,
        microbatch="auto", mode=mode,
    )  # fmt: skip
    made, left = [], []

    def remember(value):
        made.append(weakref.ref(value))
        return len(made) == 2

    # The gradient needs what passes the middle, so it is there at the end.
    with contextlib.ExitStack() as stack:
        for watched in (
            watching(
                "start", lambda _: left.append([r() is None for r in made])
            ),
            watching("middle", remember),
            failing("end backwards", MemoryError, remember),
            pytest.warns(RuntimeWarning),
        ):
            stack.enter_context(watched)
        train(BATCH)

    assert left[:2] == [[], [True, True]]


@pytest.mark.parametrize(
    "linker", ["py", pytest.param("c|py", marks=compiled)]
)
def test_pieces_are_halved_whatever_links_the_graph(linker, in_c):
    train, count = auto(theano.Mode(linker, "fast_run"))
    too_many = failing("a", MemoryError, lambda value: len(value) > 2)
    with too_many, pytest.warns(RuntimeWarning) as caught:
        assert len(train(BATCH)) == 4
    assert texts(caught) == [SIZE.format(2, 4, 2)]
    assert count.get_value() == 2


def test_auto_gives_up_at_one_sample():
    train, count = auto()
    before = train.get_state()
    train(BATCH[:1])

    with failing("b backwards", MemoryError):
        assert fails(train, BATCH, error=MemoryError) == [LOST.format(1)]
        assert fails(train, BATCH, error=MemoryError) == []

    assert train.pending == 0
    before["count"] += 1
    assert_same_state(train.get_state(), before)
    train(BATCH)
    assert count.get_value() == 2  # in one piece


class GpuArrayException(Exception):
    """Named as pygpu names what it raises for all that goes wrong."""


@pytest.mark.parametrize(
    ("error", "message", "halves"),
    [
        (MemoryError, "", True),
        (GpuArrayException, "cuMemAlloc: CUDA_ERROR: out of memory", True),
        (GpuArrayException, b"clCreateBuffer: Invalid buffer size", True),
        (GpuArrayException, "Memory object allocation failure", True),
        (GpuArrayException, "Out of resources", True),
        (GpuArrayException, "Out of host memory", True),
        (GpuArrayException, "Invalid memory object", False),
        (GpuArrayException, "Missing Blas library", False),
        (ValueError, "out of memory", False),
    ],
)
def test_only_running_out_of_memory_is_halved(error, message, halves):
    train, _ = auto()
    tries = []

    def fail(value):
        tries.append(len(value))
        raise error(message)

    with watching("a", fail):
        assert fails(train, BATCH, error=error) == []
    assert tries == ([4, 2, 1] if halves else [4])


def test_a_fixed_size_is_not_halved():
    train = trainer(microbatch=4)
    with failing("a", MemoryError, lambda value: len(value) > 2):
        assert fails(train, BATCH, error=MemoryError) == []


# -- Ctrl-C ---------------------------------------------------------------


def interrupt(value):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handled():
    """Put Python's own handler in place, and see that it stays there."""
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    now = signal.signal(signal.SIGINT, was)
    assert now is signal.default_int_handler


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("microbatch", [None, 2, "auto"])
def test_ctrl_c_takes_effect_when_the_call_is_complete(microbatch):
    train = trainer(N=2, microbatch=microbatch)
    start = train.get_state()
    states = [train(BATCH) is None or train.get_state() for _ in range(2)]

    for place in (*PLACES, "rule 0", "rule 1"):
        train.set_state(start)
        for state, applied in zip(states, (False, True)):
            with contextlib.ExitStack() as stack:
                stack.enter_context(watching(place, interrupt))
                if applied or "rule" not in place:
                    stack.enter_context(pytest.raises(KeyboardInterrupt))
                train(BATCH)
            assert train.updated is applied
            assert_same_state(train.get_state(), state)


@pytest.mark.usefixtures("handled")
def test_ctrl_c_during_a_flush_takes_effect_after_it():
    train = trainer(N=3)
    train(BATCH)
    with watching("rule 0", interrupt), pytest.raises(KeyboardInterrupt):
        train.flush()
    assert (train.pending, train.steps, train.updated) == (0, 1, True)


@pytest.mark.usefixtures("handled")
def test_ctrl_c_in_a_call_that_fails_leaves_the_window_empty():
    train = trainer(N=3)
    before = train.get_state()
    train(BATCH)

    with watching("a", interrupt), failing("b"):
        said = fails(train, BATCH, error=KeyboardInterrupt)

    assert said == [LOST.format(1)]
    assert_same_state(train.get_state(), before)


def test_a_handler_of_ones_own_is_called_after_the_call():
    train, calls = trainer(N=2), []

    def handler(*args):
        calls.append((args[0], train.pending, train.steps))

    was = signal.signal(signal.SIGINT, handler)
    try:
        with watching("a backwards", interrupt):
            assert len(train(BATCH)) == 4
        with watching("rule 0", interrupt):
            assert len(train(BATCH)) == 4
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, was)

    assert calls == [(signal.SIGINT, 1, 0), (signal.SIGINT, 0, 1)]


def test_an_ignored_ctrl_c_stays_ignored():
    train = trainer(N=2)
    was = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watching("a", interrupt):
            assert len(train(BATCH)) == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, was)


def test_other_threads_train_as_well():
    train, outputs = trainer(N=1), []
    handler = signal.getsignal(signal.SIGINT)

    def look(value):
        assert signal.getsignal(signal.SIGINT) is handler

    with watching("a", look):
        thread = threading.Thread(target=lambda: outputs.append(train(BATCH)))
        thread.start()
        thread.join()

    assert len(outputs[0]) == 4
    assert train.steps == 1


# -- The single-function form ---------------------------------------------


def test_a_call_that_raises_inside_a_window_moves_nothing_but_it(mode, gate):
    params, x, outputs, loss = network()
    updates = lasagne_accum.with_accumulated_gradients(
        loss, params, 3, lasagne.updates.adam, gate=gate, learning_rate=0.125
    )
    train = theano.function([x], outputs, updates=updates, mode=mode)
    start = updates.get_state()
    for k in range(6):
        train(BATCH + k)
    expected = updates.get_state()

    for place in PLACES:
        updates.set_state(start)
        for k in range(3):
            train(BATCH + k)
        before = updates.get_state()
        for _ in range(2):
            with failing(place), pytest.raises(Boom):
                train(BATCH + 50)
            updates.reset()
            assert_same_state(updates.get_state(), before)
            train(BATCH + 70)
            with failing(place), pytest.raises(Boom):
                train(BATCH + 50)
            moved = {
                name
                for name, value in updates.get_state().items()
                if not np.array_equal(value, before[name])
            }
            window = {"w_accumulator", "v_accumulator", "window_counter"}
            assert moved <= window
            updates.reset()

        for k in range(3, 6):
            train(BATCH + k)
        assert_same_state(updates.get_state(), expected)
