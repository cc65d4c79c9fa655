"""The benchmarks run to their end, and time what trains alike."""

import argparse
import importlib
import inspect
import os
import sys

import numpy as np
import pytest
from backend import NAME, theano, theano_only

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What runs on Theano alone.
FOR_THEANO = ["memory", "compile_time", "soak"]
THREADS = ["OMP", "OPENBLAS", "MKL", "NUMEXPR"]
TINY = "mlp:6,5,3"


@pytest.fixture
def script(monkeypatch, fast_compile):
    """Give a function that imports a file; what it sets is put back."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    for name in THREADS:
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")
    monkeypatch.setattr(
        sys, "path", [os.path.join(ROOT, "benchmarks"), *sys.path]
    )
    monkeypatch.setattr(theano.config, "floatX", "float32")
    monkeypatch.setattr(theano.config, "openmp", False)
    if NAME != "theano":
        yield importlib.import_module
        return

    random = importlib.import_module("lasagne.random")
    rng = random.get_rng()
    yield importlib.import_module
    random.set_rng(rng)


def train(models, form, rule, learning_rate=0.1):
    """Train on one window of two micro-batches; return the parameters."""
    network = models.build(TINY, NAME)
    compiled = models.compile_form(form, network, rule, 2, learning_rate)
    batches = models.make_batches(TINY, 2, 2)
    if form in ("whole batch", "microbatch="):
        batches = [map(np.concatenate, zip(*batches))]
    for x, y in batches:
        compiled(x, y)
    return [param.get_value() for param in network.params]


def assert_trains_alike(models, form, rule):
    expected = train(models, "whole batch", rule)
    for value, right in zip(train(models, form, rule), expected):
        # Values are below 1, and the result of some ten operations.
        atol = 10 * np.finfo(np.float32).eps
        np.testing.assert_allclose(value, right, rtol=0, atol=atol)


@pytest.mark.parametrize("rule", ["sgd", "nesterov_momentum", "adam"])
@pytest.mark.parametrize("form", ["switch", "lazy", "function"])
def test_forms_train_alike(script, form, rule):
    assert_trains_alike(script("models"), form, rule)


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        pytest.param("in_place", "momentum", marks=theano_only),
        ("microbatch=", "adam"),
        ("2017", "sgd"),
    ],
)
def test_further_forms_train_alike(script, form, rule):
    assert_trains_alike(script("models"), form, rule)


def test_forms_start_from_the_same_parameters(script):
    models = script("models")
    first, second = models.build(TINY, NAME), models.build(TINY, NAME)
    for this, other in zip(first.params, second.params):
        np.testing.assert_array_equal(this.get_value(), other.get_value())


def test_networks_are_the_same_on_each_backend(script):
    models, rng = script("models"), np.random.RandomState(0)
    limits = [((6, 5), (6 / 11) ** 0.5), ((5, 3), (6 / 8) ** 0.5)]
    V, W = (rng.uniform(-limit, limit, size) for size, limit in limits)
    [(x, y)] = models.make_batches(TINY, 4, 1)
    scores = np.maximum(x.dot(V), 0).dot(W)
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(4), y]

    network = models.build(TINY, NAME)
    loss, *_ = models.compile_form("gradients only", network, "sgd", 1)(x, y)
    expected = [V, np.zeros(5), W, np.zeros(3)]
    atol = 10 * np.finfo(np.float32).eps
    for param, right in zip(network.params, expected):
        np.testing.assert_allclose(param.get_value(), right, 0, atol)
    np.testing.assert_allclose(loss, losses.mean(), 0, atol)


@pytest.mark.parametrize(
    "name",
    ["overhead", *(pytest.param(s, marks=theano_only) for s in FOR_THEANO)],
)
def test_main_takes_what_the_command_line_gives(script, name):
    module = script(name)
    options = vars(module.make_parser().parse_args([]))
    bound = inspect.signature(module.main).bind(**options)
    for argument, parameter in inspect.signature(
        module.main
    ).parameters.items():
        given, default = bound.arguments[argument], parameter.default
        if isinstance(default, tuple):
            given = tuple(given)
        assert given == default


def test_unknown_models_are_refused(script):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        script("models").checked_model("mlp:5")
    assert str(caught.value) == (
        "'mlp:5' is none of mlp800, mlp2000, cnn, and not like mlp:784,800,10"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--models", "mlp800", "cnn"],
            "--models must be MLPs on pytensor, got cnn. Leave it out, or "
            "take --backend theano.",
        ),
        (
            ["--device", "cuda"],
            "--device must be cpu on pytensor, got cuda. Leave it out, or "
            "take --backend theano.",
        ),
    ],
)
def test_overhead_refuses_what_pytensor_lacks(script, capsys, words, said):
    overhead = script("overhead")
    assert overhead.parse(words).backend == "theano"
    with pytest.raises(SystemExit):
        overhead.parse([*words, "--backend", "pytensor"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.partition("error: ")[2] == said


def test_overhead_measures_all_that_the_backend_runs(script):
    overhead, models = script("overhead"), script("models")
    names = overhead.supported(models.MODELS, "theano")
    assert names == ["mlp800", "mlp2000", "cnn"]
    names = overhead.supported(models.MODELS, "pytensor")
    assert names == ["mlp800", "mlp2000"]


def test_the_mode_is_set_and_the_backend_printed(script, capsys, tmp_path):
    script("models").set_up(str(tmp_path), backend=NAME, mode="FAST_RUN")
    assert theano.config.mode == "FAST_RUN"
    assert f", {NAME} {theano.__version__} (" in capsys.readouterr().out


def test_overhead_runs_to_its_end(script, capsys, tmp_path):
    results = script("overhead").main(
        [TINY],
        ["momentum"],
        micro_batches=[1, 10],
        N=2,
        windows=2,
        split=(4, 2),
        backend=NAME,
        output=str(tmp_path / "new"),
    )
    assert list(results) == [(TINY, "momentum", 1), (TINY, "momentum", 10)]
    for times in results.values():
        assert ("in_place" in times) == (NAME == "theano")
        assert len(times) == 7 + ("in_place" in times)
        for milliseconds in times.values():
            assert milliseconds.shape == (2,)
            assert np.all(milliseconds > 0)
    printed = capsys.readouterr().out
    assert "| lazy / function | switch / plain rule |" in printed
    assert "| batch of 4 at once (ms) | microbatch=2 |" in printed
    assert (tmp_path / "new" / "overhead.png").read_bytes()[1:4] == b"PNG"


def test_overhead_judges_medians_of_ratios_within_a_round(script, capsys):
    overhead = script("overhead")
    times = {
        "gradients only": np.array([1.0, 10.0, 2.0]),
        "function": np.array([1.1, 9.0, 2.0]),
        "lazy": np.array([1.1, 9.0, 4.0]),
        "plain rule": np.array([2.0, 20.0, 4.0]),
        "switch": np.array([3.0, 30.0, 6.0]),
        "torch": np.array([2.2, 18.0, 4.0]),
    }
    whole = {"whole batch": np.ones(3), "microbatch=": np.full(3, 2.0)}
    targets = overhead.find_targets(
        {("mlp800", "adam", 10): times, ("cnn", "sgd", 1): times},
        {("cnn", "adam"): whole, ("mlp800", "adam"): whole},
        ["torch"],
    )
    values = [values for what, limit, values in targets]
    assert values == [[1.0], [1.0], [1.5], [2.0], [0.5]]
    script("models").judge(targets)
    holds = [
        line.split("|")[-2].strip()
        for line in capsys.readouterr().out.splitlines()
        if line
    ]
    assert holds[-5:] == ["yes", "yes", "NO", "NO", "yes"]


def test_missing_peers_are_skipped_with_a_line(script, capsys, monkeypatch):
    for library in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, library, None)
    assert script("overhead").available_peers() == []
    first, _, second, _ = capsys.readouterr().out.split("\n")[:4]
    assert first.startswith("Skipping torch: ")
    assert second.startswith("Skipping optax: ")


@theano_only
@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc"
)
def test_memory_runs_to_its_end(script, capsys, tmp_path):
    results = script("memory").main(
        [TINY], 4, [4, 2], ["function"], "sgd", str(tmp_path / "new")
    )
    parameters = 4 * (6 * 5 + 5 + 5 * 3 + 3)
    for form, accumulators in (("plain rule", 0), ("function", parameters)):
        measured = results[TINY, 2, form]
        assert measured["parameters"] == parameters
        assert measured["held"] == parameters + accumulators
        assert measured["resident"] >= 0
        assert measured["arrays"] > 0
    printed = capsys.readouterr().out
    assert "accumulators of function / parameters, off by" in printed
    assert (tmp_path / "new" / "memory.png").read_bytes()[1:4] == b"PNG"


@theano_only
def test_memory_refuses_pieces_that_leave_a_rest(script):
    with pytest.raises(ValueError, match="pieces") as caught:
        script("memory").main([TINY], 4, [3])
    assert str(caught.value) == (
        "`pieces` must divide the batch of 4, got [3]."
    )


@theano_only
def test_compile_time_runs_to_its_end(script, capsys, tmp_path):
    results = script("compile_time").main(
        [TINY], "sgd", 1, str(tmp_path / "new")
    )
    assert len(results[TINY]["function"]) == 1
    assert "function / plain rule" in capsys.readouterr().out
    assert (tmp_path / "new" / "compile_time.png").read_bytes()[1:4] == b"PNG"


@theano_only
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc"
)
def test_soak_tells_whether_all_held(script, capsys, monkeypatch):
    soak = script("soak")
    monkeypatch.setattr(soak, "GROWTH", np.inf)  # so short a run is uneven
    assert soak.main(["function"], 300, seed=1)
    last = capsys.readouterr().out.splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[:2] == ["function", "300"]
    assert int(cells[2]) > 0
    assert int(cells[3]) > 0
    assert cells[-1] == "yes"

    model = soak.RULES["adam"][0]
    monkeypatch.setitem(soak.RULES, "adam", (model, {"beta1": 0.5}))
    assert not soak.main(["function"], 300)
    assert capsys.readouterr().out.split("|")[-2].strip() == "NO"


@theano_only
def test_soak_finds_the_trend_of_a_memory_that_grows(script):
    trend = script("soak").trend
    assert trend(np.full(9, 7.0)) == (0, 0)
    growth, noise = trend(np.arange(9.0))
    assert growth == pytest.approx(8)
    assert noise == pytest.approx(0, abs=1e-6)
    # No line at all: squares that sum to 4, places whose squares do to 5 / 9.
    growth, noise = trend(np.array([1.0, -1, -1, 1]) + 3)
    assert growth == pytest.approx(0)
    assert noise == pytest.approx((2 / (5 / 9)) ** 0.5)
