"""Variational inference of PyMC and PyMC3, and other rules for PyTensor."""

import functools
import importlib
import re
import sys
from pathlib import Path

from lasagne_accum import accumulated, function, with_accumulated_gradients

import numpy as np
import pytest
from backend import MODULE, NAME, T, rules, theano, with_lasagne

pytestmark = [
    pytest.mark.skipif(with_lasagne, reason="needs PyMC"),
    pytest.mark.usefixtures("fast_compile"),
]
pytensor_only = pytest.mark.skipif(NAME == "theano", reason="needs PyTensor")

N, CALLS = 4, 8


def spied(update_fn, path):
    """Make a rule that also puts the gradient it sees into a variable."""

    @functools.wraps(update_fn)
    def rule(grads, params, **kw):
        updates = update_fn(grads, params, **kw)
        seen = [theano.shared(np.zeros_like(p.get_value())) for p in params]
        updates.update(zip(seen, grads))
        path.append(seen)
        return updates

    return rule


def fit(optimizer, calls, batch_size=10, callbacks=()):
    """Fit a linear regression by minibatch ADVI; return its approximation."""
    pm = importlib.import_module(MODULE.partition(".")[0])
    rng = np.random.RandomState(0)
    X = rng.randn(100, 3)
    Y = X.dot([1.0, 2.0, 3.0]) + rng.randn(100)
    with pm.Model():
        if NAME == "theano":
            # The same samples of both, of streams of the same seed.
            x, y = (pm.Minibatch(data, batch_size) for data in (X, Y))
        else:
            x, y = pm.Minibatch(X, Y, batch_size=batch_size)
        w = pm.Normal("w", 0, 1, shape=3)
        pm.Normal("y", x.dot(w), 1, observed=y, total_size=len(Y))
        return pm.fit(
            calls,
            method="advi",
            obj_optimizer=optimizer,
            random_seed=1,
            progressbar=False,
            callbacks=callbacks,
        )


def moments(approximation):
    return [param.get_value() for param in approximation.params]


def recorder(path):
    """Make a callback that keeps the parameters after each call."""
    return lambda approximation, losses, call: path.append(
        moments(approximation)
    )


@pytest.mark.parametrize("gate", ["switch", "lazy"])
def test_pymc_fits_with_the_mean_gradient_of_N_minibatches(gate):
    # With a rate of zero, all gradients are taken at the same point.
    seen, each, path = [], [], []
    still = functools.partial(rules.sgd, learning_rate=0.0)

    def look(*args):
        each.append([v.get_value() for v in seen[0]])

    fit(spied(still, seen), N, callbacks=[look])
    step = functools.partial(rules.sgd, learning_rate=0.001)
    fit(accumulated(step, N, gate=gate), N, callbacks=[recorder(path)])

    means = [np.mean(g, axis=0) for g in zip(*each)]
    for before, kept, after, mean in zip(path[0], path[-2], path[-1], means):
        np.testing.assert_array_equal(before, kept)
        np.testing.assert_allclose(after, before - 0.001 * mean, 1e-12)


def test_a_rule_called_without_a_loss_waits_for_it():
    one = fit(accumulated(rules.adam(learning_rate=0.1), N), CALLS)
    other = fit(accumulated(rules.adam, N)(learning_rate=0.1), CALLS)

    for a, b in zip(moments(one), moments(other)):
        assert np.all(a == b)


@pytensor_only
def test_the_block_of_the_readme_prints_what_it_says(capsys):
    np.random.seed(0)
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    [block] = re.findall(r"^```python pymc\n(.*?)^```$", text, re.M | re.S)

    exec(block, {})

    [said] = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_accumulating_leads_to_the_posterior():
    approximation = fit(accumulated(rules.adam(learning_rate=0.1), 5), 1500)
    mean = approximation.mean.eval()
    # The posterior of w has a standard deviation of about 0.1.
    np.testing.assert_allclose(mean, [1, 2, 3], atol=0.35)


@pytensor_only
def test_streams_of_pymc_are_part_of_the_state():
    import pymc as pm

    # Nothing says how it moves but PyMC, when it compiles.
    _, batch = T.random.shared_rng(seed=1).normal(size=5)
    w = theano.shared(0.0, "w")
    loss = ((w - batch) ** 2).mean()
    updates = with_accumulated_gradients(
        loss, [w], N, rules.sgd, learning_rate=0.1
    )
    train = pm.compile([], loss, updates=updates, random_seed=1)

    train(), train()
    saved, path = updates.get_state(), []
    for _ in range(2):
        updates.set_state(saved)
        [train() for _ in range(7)]
        path.append(w.get_value())

    assert path[0] == path[1] != 0


@pytensor_only
@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="pytensor_ml needs Python 3.12"
)
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "nadam"])
@pytest.mark.parametrize("form", ["switch", "lazy", "function"])
def test_rules_of_pytensor_ml_see_the_mean_gradient(name, form):
    optim = pytest.importorskip("pytensor_ml.optim")
    rule = getattr(optim, f"{name}_updates")
    rng = np.random.RandomState(0)
    X = rng.randn(2 * N * 5, 3)

    def regression():
        w, x = theano.shared(np.ones(3), "w"), T.dmatrix("x")
        return w, x, T.sqr(x.dot(w) - 1).mean()

    w, x, loss = regression()
    whole = theano.function([x], updates=rule(loss, [w], learning_rate=0.1))
    whole(X[: N * 5]), whole(X[N * 5 :])

    v, x, loss = regression()
    if form == "function":
        train = function([x], None, loss, [v], N, rule, learning_rate=0.1)
    else:
        updates = with_accumulated_gradients(
            loss, [v], N, rule, gate=form, learning_rate=0.1
        )
        train = theano.function([x], updates=updates)
    for i in range(0, len(X), 5):
        train(X[i : i + 5])

    np.testing.assert_allclose(v.get_value(), w.get_value(), 1e-12)
    assert not np.array_equal(w.get_value(), np.ones(3))
