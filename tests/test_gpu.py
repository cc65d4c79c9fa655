"""What holds on the CPU holds on a GPU, where it counts: in device memory.

Run it by ``make test-gpu``; it is skipped where Theano has no GPU.
"""

import functools
import os
import subprocess
import sys

from lasagne_accum import function, with_accumulated_gradients

import numpy as np
import pytest
import theano
import theano.tensor as T
from forms import FORMS
from numpy.testing import assert_allclose, assert_array_equal
from test_equivalence import RULES, every_rule, hyper

pytestmark = pytest.mark.skipif(
    theano.config.device == "cpu", reason="Theano has no GPU: make test-gpu"
)

# OpenCL divides and takes roots to 3 units in the last place, and a rule has
# no more than 16 such steps: this is for the updates of one test.
UPDATES = 4
TOLERANCE = UPDATES * 16 * 3 * np.finfo("float32").eps

SHAPES = [(3, 4)]
ODD_SHAPES = [(2, 3), (4,), (), (0, 2), (1, 3)]


def on_cpu(mode="FAST_COMPILE"):
    """Make a mode without the GPU."""
    return theano.compile.get_mode(mode).excluding("gpuarray")


def gradients(shapes, dtype, seed):
    """Make gradients whose weighted sums are exact, none near zero."""
    rng = np.random.RandomState(seed)
    return [
        np.asarray(rng.randint(32, 64, shape) / 64, dtype) for shape in shapes
    ]


def start(shapes, dtype):
    return [
        np.linspace(1, 2, int(np.prod(shape))).reshape(shape).astype(dtype)
        for shape in shapes
    ]


def is_on_gpu(variable):
    return variable.type.context_name != "cpu"


class Trained:
    """A form at work on shared parameters, its gradients given."""

    def __init__(self, form, rule, shapes, dtype="float32", **options):
        self.shapes, self.dtype = shapes, dtype
        target = options.pop("target", None)
        self.params = [
            theano.shared(
                value,
                f"p{i}",
                broadcastable=[axis == 1 for axis in value.shape],
                **({} if target is None else {"target": target}),
            )
            for i, value in enumerate(start(shapes, dtype))
        ]
        grads = [
            T.TensorType(dtype, param.broadcastable)() for param in self.params
        ]
        weight = T.dscalar("weight")
        self.form = FORMS[form](grads, self.params, weight, rule, **options)

    def call(self, seed, weight=1.0, factor=1.0):
        grads = gradients(self.shapes, self.dtype, seed)
        factor = np.asarray(factor, self.dtype)
        return self.form.call([grad * factor for grad in grads], weight)

    def events(self):
        """Go through all that can happen; give what is seen after each."""
        form = self.form
        form.set_N(3)
        yield self.call(1), self.seen()
        yield self.call(2, 2.0, np.nan), self.seen()  # skipped
        yield self.call(3, 0.0, np.nan), self.seen()  # of no weight
        yield self.call(4, 3.0), self.seen()  # the boundary
        form.set_N(2)
        yield self.call(5), self.seen()
        saved = form.get_state()
        yield self.call(6, 2.0), self.seen()
        after = form.get_state()
        form.set_state(saved)
        assert form.pending == 1
        yield self.call(6, 2.0), self.seen()
        assert_states_equal(form.get_state(), after)
        yield self.call(7, -1.0), self.seen()  # skipped
        yield form.flush(), self.seen()  # of nothing
        yield self.call(8), self.seen()
        yield form.flush(), self.seen()
        yield self.call(9, 1.0, np.inf), self.seen()  # skipped
        yield self.call(9), self.seen()
        form.reset()
        yield form.flush(), self.seen()
        form.set_N(1)
        yield self.call(9), self.seen()

    def seen(self):
        values = [param.get_value() for param in self.params]
        return self.form.pending, self.form.skipped, values


def assert_states_equal(one, other):
    assert list(one) == list(other)
    for name in one:
        assert_array_equal(one[name], other[name], name)


def assert_same_events(one, other, rtol=0):
    for (result, seen), (expected, reference) in zip(one, other):
        assert bool(result) == bool(expected)
        assert seen[:2] == reference[:2]
        for value, right in zip(seen[2], reference[2]):
            assert_allclose(value, right, rtol=rtol, atol=rtol)


def rule_of(name):
    return functools.partial(RULES[name], **hyper(name))


def quick(first, *others):
    """Leave the others out where there is no time to compile them all."""
    marks = pytest.mark.compiled
    return [first, *(pytest.param(other, marks=marks) for other in others)]


def skip_without_kernels(name):
    if "opencl" in theano.config.device and name in ("adamax", "amsgrad"):
        pytest.skip("Theano's kernel for `maximum` does not build in OpenCL.")


@pytest.mark.compiled
@every_rule
def test_every_form_of_every_rule_has_the_same_bits_and_those_of_the_cpu(name):
    skip_without_kernels(name)
    options = {"skip_nonfinite": True, "mode": None}
    forms = [
        Trained(form, rule_of(name), SHAPES, **options)
        for form in ("switch", "lazy", "by hand", "function")
    ]
    assert all(is_on_gpu(param) for form in forms for param in form.params)
    events = [list(form.events()) for form in forms]
    for others in events[1:]:
        assert_same_events(events[0], others)

    options["mode"] = on_cpu()
    cpu = Trained("switch", rule_of(name), SHAPES, target="cpu", **options)
    assert not any(map(is_on_gpu, cpu.params))
    assert_same_events(events[0], list(cpu.events()), TOLERANCE)


@pytest.mark.compiled
@pytest.mark.parametrize("form", ["switch", "function"])
def test_parameters_of_odd_shapes(form):
    options = {"skip_nonfinite": True, "mode": None}
    gpu = Trained(form, rule_of("momentum"), ODD_SHAPES, **options)
    options["mode"] = on_cpu()
    cpu = Trained(
        form, rule_of("momentum"), ODD_SHAPES, target="cpu", **options
    )
    assert_same_events(gpu.events(), cpu.events(), TOLERANCE)


@pytest.mark.compiled
@pytest.mark.parametrize("form", ["switch", "function"])
def test_float16_parameters_have_float32_accumulators(form):
    def sgd(grads, params):
        step = np.float16(0.0625)
        return [(p, p - step * grad) for p, grad in zip(params, grads)]

    trained = Trained(form, sgd, SHAPES, "float16", mode=None)
    made = trained.form.train if form == "function" else trained.form.updates
    (accumulator,) = made.accumulators
    assert is_on_gpu(accumulator)
    assert accumulator.dtype == "float32"
    assert trained.params[0].dtype == "float16"

    # 2048 + 1 is 2048 in float16, so that its sum would forget the ones.
    trained.form.set_N(4)
    for factor in (4096, 1, 1, 1):
        trained.call(1, factor=factor)
    (grads,) = gradients(SHAPES, "float64", 1)
    mean = (grads * 4099 / 4).astype("float16")
    (before,) = start(SHAPES, "float16")
    assert_allclose(
        trained.params[0].get_value(),
        before - np.float16(0.0625) * mean,
        rtol=2 * np.finfo("float16").eps,
    )


def network(target=None):
    """Make an MLP whose kernels every device has, and data for it."""
    rng = np.random.RandomState(3)

    def uniform(*shape):
        return rng.uniform(-0.5, 0.5, shape).astype("float32")

    options = {} if target is None else {"target": target}
    # Biases are rows, since a kernel for vectors takes time of its own.
    params = [
        theano.shared(
            value, name, broadcastable=[n == 1 for n in value.shape], **options
        )
        for name, value in (
            ("W1", uniform(5, 7)),
            ("b1", uniform(1, 7)),
            ("W2", uniform(7, 3)),
            ("b2", uniform(1, 3)),
        )
    ]
    x, y = T.matrix("x"), T.matrix("y")
    hidden = T.tanh(x.dot(params[0]) + params[1])
    errors = (hidden.dot(params[2]) + params[3] - y) ** 2
    data = uniform(12, 5), uniform(12, 3)
    return params, [x, y], errors.sum(axis=1), data


def values(variables):
    return [variable.get_value() for variable in variables]


# A sum of 12 products rounds 12 times; three layers of sums make a gradient,
# no number in them is larger than 4, and the updates follow one another.
NETWORK_TOLERANCE = TOLERANCE + UPDATES * 3 * 12 * 4 * np.finfo("float32").eps


def trained_in(form, params, inputs, errors, **options):
    """Compile a form of Nesterov's momentum, N=2; give a function of calls."""
    loss, rule = errors.mean(), rule_of("nesterov_momentum")
    if form == "function":
        return function(inputs, loss, loss, params, 2, rule, **options)
    updates = with_accumulated_gradients(loss, params, 2, rule, gate=form)
    train = theano.function(inputs, loss, updates=updates, **options)
    train.accumulators, train.kept = updates.accumulators, updates
    return train


def train_network(train, data):
    x, y = data
    return [
        float(train(x[start : start + 3], y[start : start + 3]))
        for start in (0, 3, 6, 9)
    ]


@pytest.mark.compiled
def test_a_network_is_trained_as_on_the_cpu_by_every_form():
    params, inputs, errors, data = network("cpu")
    train = trained_in("switch", params, inputs, errors, mode=on_cpu())
    losses, expected = train_network(train, data), values(params)

    found = []
    for form in ("switch", "lazy", "function"):
        params, inputs, errors, data = network()
        train = trained_in(form, params, inputs, errors)
        found.append((train_network(train, data), values(params)))
    for form_losses, form_params in found:
        assert form_losses == found[0][0]
        for value, first, right in zip(form_params, found[0][1], expected):
            assert_array_equal(value, first)
            assert_allclose(value, right, atol=NETWORK_TOLERANCE)
    assert_allclose(found[0][0], losses, atol=NETWORK_TOLERANCE)


@pytest.mark.compiled
def test_pieces_of_a_batch_give_what_the_batch_gives():
    whole, cut = network(), network()
    rule = rule_of("adam")
    trains = [
        function(
            inputs,
            [errors.mean(), errors],
            errors.mean(),
            params,
            update_fn=rule,
            microbatch=microbatch,
        )
        for (params, inputs, errors, data), microbatch in (
            (whole, None),
            (cut, 5),
        )
    ]
    for outputs in zip(*(train(*whole[3]) for train in trains)):
        assert isinstance(outputs[1], np.ndarray)
        assert_allclose(*outputs, atol=NETWORK_TOLERANCE)
    for value, right in zip(values(cut[0]), values(whole[0])):
        assert_allclose(value, right, atol=NETWORK_TOLERANCE)


# What moves between the host and the device, and what is done in place.


@pytest.fixture
def graphs_only(monkeypatch):
    """Make the graphs that would run, without compiling their kernels."""
    monkeypatch.setattr(theano.config, "linker", "py")
    monkeypatch.setattr(theano.compile.mode, "instantiated_default_mode", None)


def nodes(compiled):
    return compiled.maker.fgraph.toposort()


def transfers(compiled):
    """List what moves between host and device besides inputs and outputs."""
    graph = compiled.maker.fgraph
    n_inputs = sum(not i.shared for i in compiled.maker.inputs)
    n_outputs = len(graph.outputs) - len(graph.update_mapping or ())
    own = {*graph.inputs[:n_inputs], *graph.outputs[:n_outputs]}
    return [
        node
        for node in nodes(compiled)
        if type(node.op).__name__ in ("GpuFromHost", "HostFromGpu")
        and not all(node.outputs[0].broadcastable)
        and not own & {*node.inputs, *node.outputs}
    ]


def all_functions(form):
    """Compile a form with every option; give its functions, named."""
    params, inputs, errors, _ = network()
    weight = T.dscalar("weight")
    loss, rule = errors.mean(), rule_of("adam")
    options = {"weight": weight, "skip_nonfinite": True}
    if form == "function":
        train = function(
            [*inputs, weight], loss, loss, params, 2, rule, **options
        )
        variables = [*train._applied, *train._collected]
        return {"accumulate": train.accumulate, "apply": train.apply}, (
            train.accumulators,
            variables,
        )
    updates = with_accumulated_gradients(
        loss, params, 2, rule, gate=form, **options
    )
    train = theano.function(
        [*inputs, weight], [loss, updates.updated], updates=updates
    )
    return {"train": train, "apply": updates._compiled_apply()}, (
        updates.accumulators,
        list(updates),
    )


@pytest.mark.parametrize("form", ["switch", "lazy", "function"])
def test_only_inputs_outputs_and_scalars_are_transferred(form, graphs_only):
    functions, (accumulators, variables) = all_functions(form)
    for name, compiled in functions.items():
        assert not transfers(compiled), name
    assert all(map(is_on_gpu, accumulators))
    for variable in variables:
        assert is_on_gpu(variable) == (variable.ndim > 0), variable


@pytest.mark.parametrize("form", ["switch", "function"])
def test_all_is_done_in_place(form, graphs_only):
    params, inputs, errors, _ = network()
    train = trained_in(form, params, inputs, errors)
    functions = [train]
    if form == "function":
        functions = [train.accumulate, train.apply]
    for compiled in functions:
        graph = compiled.maker.fgraph
        for output, index in graph.update_mapping.items():
            new, old = graph.outputs[output], graph.inputs[index]
            while old.ndim > 0 and new is not old:
                op, i = new.owner.op, new.owner.outputs.index(new)
                places = dict(getattr(op, "view_map", {}))
                places.update(getattr(op, "destroy_map", {}))
                assert i in places, f"{op} makes room for {old}"
                new = new.owner.inputs[places[i][0]]
    if form == "function":
        divisions = [n for n in nodes(train.apply) if "iv" in str(n.op)]
        assert len(divisions) == len(params)
        assert all(node.op.destroy_map for node in divisions)
    products = [
        node for node in nodes(functions[0]) if "GpuGemm" in str(node.op)
    ]
    # Both layers' gradients are added to the accumulators as they come.
    sums = [node for node in products if node.inputs[0].owner is None]
    assert len(sums) == 2
    assert all(node.op.inplace for node in sums)


@pytest.mark.compiled
def test_nothing_is_read_back_but_counters(monkeypatch):
    params, inputs, errors, data = network()
    loss = errors.mean()
    rule = rule_of("nesterov_momentum")
    train = function(inputs, loss, loss, params, 3, rule)
    updates = with_accumulated_gradients(loss, params, 3, rule)
    single = theano.function(inputs, loss, updates=updates)
    single(*data)
    updates.flush()  # compiles

    def refused(array, *args, **kw):
        assert array.ndim == 0, "An array was read back."
        return get_value(array, *args, **kw)

    kind = type(params[0])
    get_value = kind.get_value
    monkeypatch.setattr(kind, "get_value", refused)
    with pytest.raises(AssertionError, match="read back"):
        params[0].get_value()
    train(*data), single(*data)
    assert (train.pending, train.steps, train.updated) == (1, 0, False)
    assert train.flush()
    assert updates.flush()
    assert (train.pending, train.steps, train.updated) == (0, 1, True)
    train(*data), single(*data)
    train.reset(), updates.reset()
    assert train.pending == 0
    assert updates.counter.get_value() == 0


@pytest.mark.parametrize(
    "form", quick("function", "switch", "lazy", "by hand")
)
def test_reset_forgets_nan_on_the_device(form):
    trained = Trained(form, rule_of("sgd"), SHAPES, mode=None)
    trained.form.set_N(2)
    trained.call(1, factor=np.nan)
    trained.form.reset()
    trained.call(1), trained.call(2)
    assert np.isfinite(trained.params[0].get_value()).all()


@pytest.mark.parametrize("form", quick("function", "switch"))
def test_a_state_moves_from_one_device_to_the_other_and_back(form):
    rule = rule_of("adam")
    gpu = Trained(form, rule, SHAPES, mode=None)
    cpu = Trained(form, rule, SHAPES, mode=on_cpu(), target="cpu")
    for trained in (gpu, cpu):
        trained.form.set_N(2)
        trained.call(1), trained.call(2), trained.call(3)
    for one, other in ((gpu, cpu), (cpu, gpu)):
        saved = one.form.get_state()
        assert {type(value) for value in saved.values()} == {np.ndarray}
        other.form.set_state(saved)
        assert_states_equal(other.form.get_state(), saved)
        assert one.call(4)
        assert other.call(4)
        for value, right in zip(values(other.params), values(one.params)):
            assert_allclose(value, right, rtol=TOLERANCE)
        one.call(5), other.call(5)
    assert is_on_gpu(gpu.params[0])
    assert not is_on_gpu(cpu.params[0])


@pytest.mark.compiled
def test_an_accumulator_is_where_its_parameter_is():
    target = theano.shared(np.ones(2, "float32")).type.context_name
    scalar = theano.shared(np.ones((), "float32"), "s", target=target)
    host = theano.shared(np.ones(2, "float32"), "h", target="cpu")
    assert is_on_gpu(scalar)
    assert not is_on_gpu(host)
    train = function(
        [],
        None,
        scalar**2 + (host**2).sum(),
        [scalar, host],
        2,
        rule_of("sgd"),
    )
    assert [is_on_gpu(a) for a in train.accumulators] == [True, False]
    train(), train()
    assert scalar.get_value() == 1 - 0.0625 * 2
    assert_array_equal(host.get_value(), [1 - 0.0625 * 2] * 2)


OUT_OF_MEMORY = """
import lasagne_accum
import lasagne, numpy, theano, warnings
import theano.tensor as T

w = theano.shared(numpy.ones((1, 1024), "float32"), "w")
assert w.type.context_name != "cpu"
x = T.matrix("x")
wide = x.dot(w)  # 4 KB for each sample
loss = T.tanh(wide).sum(axis=1).mean()
train = lasagne_accum.function(
    [x], loss, loss, [w], 1, lasagne.updates.sgd, learning_rate=1.0,
    microbatch="auto",
)
samples = numpy.full((2**17, 1), 2.0**-8, "float32")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    value = train(samples)
print(float(value), float(w.get_value()[0, 0]), *[w.message for w in caught])
"""


@pytest.mark.compiled
@pytest.mark.skipif(
    "opencl" not in theano.config.device,
    reason="Only pocl's devices can be given a memory limit.",
)
def test_auto_halves_the_pieces_when_device_memory_runs_out():
    # Half a GB of hidden units, and no more than a quarter in one array.
    result = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        env=dict(os.environ, POCL_MEMORY_LIMIT="1"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    loss, param, warning = result.stdout.split(maxsplit=2)
    assert_allclose(float(loss), 1024 * np.tanh(2**-8), rtol=1024 * 6e-8)
    assert float(param) == np.float32(1) - np.float32(2**-8)
    assert "since 131072 samples at once ran out of memory" in warning
