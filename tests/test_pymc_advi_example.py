"""The example for PyMC measures what it says, and the same each time."""

import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pymc", reason="PyMC is not installed")
for name in ("sklearn", "tqdm"):
    pytest.importorskip(name, reason=f"{name} is not installed")
image = pytest.importorskip("matplotlib.image")
pytensor = pytest.importorskip("pytensor")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "examples", "pymc_advi.py")
EPS = np.finfo(float).eps
QUICK = {"mode": "FAST_COMPILE", "cxx": ""}
NO_BAR = SimpleNamespace(update=int, set_description=str)


@pytest.fixture(scope="module")
def script():
    """Import the script."""
    spec = importlib.util.spec_from_file_location("pymc_advi_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    """Measure much after a short fit."""
    with pytensor.config.change_flags(**QUICK):
        output = tmp_path_factory.mktemp("runs")
        return script.main(steps=5, windows=100, output=str(output))


def test_accumulation_divides_the_variance_by_the_window(script, runs):
    plain, accumulated = runs["plain"].grads, runs["accumulated"].grads
    ratio = script.variance(accumulated)[0] / script.variance(plain)[0]

    # A sum of d squares, from W windows, is off by sqrt(2 / (W d)) of itself;
    # d is less than all dimensions since some vary much more than others.
    spectrum = np.linalg.eigvalsh(np.cov(plain.T))
    dimensions = spectrum.sum() ** 2 / (spectrum**2).sum()
    error = (2 / (len(accumulated) - 1) / dimensions) ** 0.5
    assert len(plain) == 10 * len(accumulated) == 1000
    assert abs(10 * ratio - 1) < 4 * error < 0.3


def test_the_rule_gets_the_means_of_the_plain_gradients(runs):
    plain, accumulated = runs["plain"].grads, runs["accumulated"].grads
    means = plain.reshape(-1, 10, 62).mean(axis=1)
    far = 10 * EPS * abs(plain).max()
    np.testing.assert_allclose(accumulated, means, rtol=0, atol=far)
    np.testing.assert_array_equal(
        runs["accumulated"].elbos, runs["plain"].elbos
    )


def test_a_large_batch_shares_its_monte_carlo_samples(script, runs):
    plain, error = script.variance(runs["plain"].grads)
    large, large_error = script.variance(runs["large batch"].grads)
    assert runs["large batch"].way.batch == 100
    assert plain / 10 + error / 10 < large - large_error
    assert large + large_error < plain


def test_all_ways_see_as_many_rows(script, runs):
    assert {script.rows_seen(run)[-1] for run in runs.values()} == {500}
    steps = [run.steps for run in runs.values()]
    assert steps == [50, 5, 5, 50]
    starts = {run.lacks[0] for run in runs.values()}
    assert len(starts) == 1
    for run in runs.values():
        assert run.lacks[-1] < run.lacks[0]
        assert run.lacks.min() > 0


def test_pymc_estimates_the_exact_elbo_and_its_gradient(script):
    rows, labels = script.load_data()
    point = np.random.RandomState(0).normal(-1, 0.5, 62)
    elbo, gradient = script.exact_elbo(point, rows, labels)
    way = script.Way("", 200, 1, 0.01, 1)

    with pytensor.config.change_flags(**QUICK):
        there = SimpleNamespace(x=point, fun=-elbo)
        run = script.fit(way, rows, labels, there, 1, 400, 0, NO_BAR)

    for estimates, exact in ((run.elbos, elbo), (-run.grads, gradient)):
        error = estimates.std(axis=0, ddof=1) / 400**0.5
        assert np.all(abs(estimates.mean(axis=0) - exact) < 4 * error)
    assert np.linalg.norm(gradient) > 10 * np.linalg.norm(error)


def test_the_exact_elbo_is_that_of_a_coin_without_features(script):
    point = np.repeat([2.0, np.log(np.expm1(0.5))], 3)
    elbo, gradient = script.exact_elbo(
        point, np.full((4, 3), 1e-9), np.array([0, 1, 1, 0])
    )
    kl = 3 * (np.log(1 / 0.5) + (0.5**2 + 2**2 - 1) / 2)
    assert elbo == pytest.approx(-4 * np.log(2) - kl)
    of_sigma = (1 / 0.5 - 0.5) * (1 - np.exp(-0.5))
    np.testing.assert_allclose(gradient, np.repeat([-2, of_sigma], 3))


def test_the_exact_gradient_is_that_of_differences(script):
    rng = np.random.RandomState(0)
    rows, labels = rng.normal(size=(20, 3)), rng.randint(2, size=20)
    point, h = rng.normal(size=6), EPS ** (1 / 3)
    _, gradient = script.exact_elbo(point, rows, labels)
    for i, step in enumerate(h * np.eye(6)):
        above, _ = script.exact_elbo(point + step, rows, labels)
        below, _ = script.exact_elbo(point - step, rows, labels)
        far = 100 * EPS ** (2 / 3)
        assert gradient[i] == pytest.approx((above - below) / (2 * h), abs=far)


def test_no_approximation_is_better_than_the_best(script):
    rows, labels = script.load_data()
    best = script.fit_exactly(rows, labels)
    assert best.success
    assert abs(best.jac).max() < 1e-5
    rng = np.random.RandomState(0)
    for _ in range(20):
        other = best.x + 0.01 * rng.normal(size=62)
        assert script.exact_elbo(other, rows, labels)[0] < -best.fun


def test_it_prints_and_draws_and_the_seed_decides(script, tmp_path, capsys):
    rows, labels = script.load_data()
    best = script.fit_exactly(rows, labels)
    output = tmp_path / "new"
    with pytensor.config.change_flags(**QUICK):
        runs = script.main(3, every=2, windows=3, seed=1, output=str(output))
        run = runs["accumulated"]
        same, other = [
            script.fit(run.way, rows, labels, best, 3, 3, seed, NO_BAR)
            for seed in (1, 2)
        ]

    for field in ("lacks", "elbos", "grads"):
        values = getattr(run, field)
        np.testing.assert_array_equal(getattr(same, field), values)
        assert np.any(getattr(other, field) != values)
    said = capsys.readouterr().out
    assert said.startswith(script.findings(runs, 569, best, 1))
    assert "\n| accumulated | 0.02 | 10 | 3 | " in said
    assert "They have 1/2 of the variance (" in said.replace("\n", " ")
    picture = image.imread(str(output / "pymc_advi.png"))
    assert picture.shape[:2] == (504, 1320)
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) > 10


def test_findings_are_those_of_the_numbers(script, runs):
    rows, labels = script.load_data()
    best = script.fit_exactly(rows, labels)
    text = script.findings(runs, len(rows), best, 0)
    assert max(map(len, text.split("\n\n")[2].splitlines())) < 80
    text = text.replace("\n", " ")
    variances = [script.variance(run.grads)[0] for run in runs.values()]
    assert f"({variances[1] / variances[0]:.3f} measured)" in text
    for total in variances:
        assert f" | {total:.0f} ± " in text
        assert f" | {total / variances[0]:.3f} | " in text
    for run in runs.values():
        last = run.lacks[-20:]
        assert f" | {last.mean():.2f} ± {last.std():.2f} |" in text


def test_never_near_is_said_so(script, runs):
    run = runs["plain"]._replace(steps=100)
    far, near = np.full(101, 10.0), np.arange(101)[::-1]
    assert script.until_near(run._replace(lacks=far)) == "never"
    assert script.until_near(run._replace(lacks=near)) == "910"


def test_the_parser_has_the_defaults_of_main(script):
    parameters = inspect.signature(script.main).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    del defaults["windows"]
    assert vars(script.make_parser().parse_args([])) == defaults


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_numbers_must_be_positive(script, capsys, number):
    with pytest.raises(SystemExit) as caught:
        script.make_parser().parse_args(["--every", number])
    assert caught.value.code == 2
    said = f"argument --every: invalid positive value: '{number}'\n"
    assert capsys.readouterr().err.endswith(said)


def test_it_says_what_to_install():
    code = "import runpy, sys; sys.modules['pymc'] = None; "
    child = subprocess.run(
        [sys.executable, "-c", code + f"runpy.run_path({SCRIPT!r})"],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1
    assert child.stderr == (
        "pymc_advi.py: error: cannot find pymc. Run `pip install "
        '"lasagne_accum[pymc]" matplotlib scikit-learn tqdm`.\n'
    )
