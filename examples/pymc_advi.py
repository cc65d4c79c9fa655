#!/usr/bin/env python
"""Fit a logistic regression by minibatch ADVI, with and without accumulation.

Try::

    python examples/pymc_advi.py
    python examples/pymc_advi.py --steps 500 --every 20 --output plots

The model has a weight for each of the 30 features of scikit-learn's breast
cancer data, and one for a constant. Adam fits it in four ways: to minibatches
of 10; to the same ones, ten of them accumulated for a step; to minibatches of
100; and to those of 10 again, with a lower learning rate. All ways see equally
many rows.

How good an approximation is needs no sampling here: the ELBO of a logistic
regression is a sum of integrals in one dimension. So is its gradient, and the
best approximation is known: all ELBOs are given as what they lack to its. And
at the best one, it is measured how much the gradient varies that Adam gets.

PyMC takes one Monte Carlo sample of the weights a call: its ``obj_n_mc`` does
not go with ``pm.Minibatch``. Accumulation averages over these samples, too.
"""

import argparse
import logging
import os
import textwrap
from collections import OrderedDict, namedtuple

import lasagne_accum

try:
    import numpy as np
    import pymc as pm
    import pytensor
    import pytensor.tensor as pt
    from matplotlib.figure import Figure
    from scipy.optimize import minimize
    from scipy.special import expit
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import scale
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"pymc_advi.py: error: cannot find {error.name}. Run `pip install "
        '"lasagne_accum[pymc]" matplotlib scikit-learn tqdm`.'
    ) from None

# PyMC would log a line for each fit, in the middle of the bar.
logging.getLogger("pymc").setLevel(logging.WARNING)

# `calls` is how many of them see as many rows as the largest batch has.
Way = namedtuple("Way", "name batch N learning_rate calls")
Run = namedtuple("Run", "way steps lacks elbos grads")
# An approximation that lacks so few nats is called near.
NEAR = 10


def main(
    steps=1000,
    *,
    every=10,
    batch=10,
    learning_rate=0.02,
    windows=300,
    seed=0,
    output=".",
):
    """Fit in each way, print what came out, draw the figure."""
    os.makedirs(output, exist_ok=True)
    rows, labels = load_data()
    best = fit_exactly(rows, labels)
    large, lower = batch * every, learning_rate / every**0.5
    ways = [
        Way("plain", batch, 1, learning_rate, every),
        Way("accumulated", batch, every, learning_rate, every),
        Way("large batch", large, 1, learning_rate, 1),
        Way("plain, lower rate", batch, 1, lower, every),
    ]
    total = (steps + windows) * sum(way.calls for way in ways)
    with tqdm(total=total, unit="call") as bar:
        runs = OrderedDict(
            (way.name, fit(way, rows, labels, best, steps, windows, seed, bar))
            for way in ways
        )

    print(findings(runs, len(rows), best, seed))
    path = os.path.join(output, "pymc_advi.png")
    draw(path, runs)
    print(f"\nDrew the figure to {path}")
    return runs


# The model


def load_data():
    """Load the features, standardized, behind a constant, and the labels."""
    features, labels = load_breast_cancer(return_X_y=True)
    rows = np.column_stack([np.ones(len(features)), scale(features)])
    return rows, labels.astype("int32")


def build(rows, labels, batch):
    """Make the model of minibatches of the data."""
    with pm.Model() as model:
        x, y = pm.Minibatch(rows, labels, batch_size=batch)
        weights = pm.Normal("weights", 0, 1, shape=rows.shape[1])
        pm.Bernoulli(
            "y", logit_p=x @ weights, observed=y, total_size=len(rows)
        )
    return model


def exact_elbo(point, rows, labels):
    """Compute the ELBO of an approximation, and its gradient.

    The logit of a row is normal, so that its likelihood needs an integral in
    one dimension only: Gauss and Hermite's is right to rounding.
    """
    mean, rho = np.split(point, 2)
    sigma = np.log1p(np.exp(rho))
    nodes, shares = np.polynomial.hermite_e.hermegauss(40)
    shares = shares / shares.sum()

    spread = np.sqrt(rows**2 @ sigma**2)
    logits = (rows @ mean)[:, None] + spread[:, None] * nodes
    signs = 2 * labels[:, None] - 1
    likelihood = -np.logaddexp(0, -signs * logits) @ shares
    divergence = (mean**2 + sigma**2 - 1) / 2 - np.log(sigma)

    errors = (labels[:, None] - expit(logits)) * shares
    of_mean = errors.sum(axis=1) @ rows - mean
    of_sigma = (errors @ nodes / spread) @ rows**2 * sigma - sigma + 1 / sigma
    gradient = np.concatenate([of_mean, of_sigma * expit(rho)])
    return likelihood.sum() - divergence.sum(), gradient


def fit_exactly(rows, labels):
    """Find the best approximation without any noise."""

    def cost(point):
        elbo, gradient = exact_elbo(point, rows, labels)
        return -elbo, -gradient

    return minimize(cost, np.zeros(2 * rows.shape[1]), jac=True)


# Fitting


def fit(way, rows, labels, best, steps, windows, seed, bar):
    """Fit in one way, then measure the gradient of the best approximation.

    Returns
    -------
    Run
        What the ELBO lacked at the start and after each hundredth of the
        calls; PyMC's estimates of the best ELBO, one a call; and the
        gradients that the rule got there, one a step.
    """
    bar.set_description(way.name)
    rate = pytensor.shared(way.learning_rate, "learning_rate")
    given = pytensor.shared(np.zeros_like(best.x), "given_gradient")
    rule = watched(pm.adam(learning_rate=rate), given)
    if way.N > 1:
        rule = lasagne_accum.accumulated(rule, way.N)

    with build(rows, labels, way.batch):
        inference = pm.ADVI(random_seed=seed)
        # Or a batch's cost would be that of its share of the rows.
        inference.approx.scale_cost_to_minibatch = False
        points = train(inference, rule, steps * way.calls, bar)
    lacks = [-best.fun - exact_elbo(p, rows, labels)[0] for p in points]

    # With a rate of 0, Adam stays where it is put.
    rate.set_value(0.0)
    elbos, grads = measure(inference, given, best, windows * way.calls, bar)
    taken = steps * way.calls // way.N
    return Run(way, taken, np.array(lacks), elbos, grads[way.N - 1 :: way.N])


def train(inference, rule, calls, bar):
    """Fit, and list the approximations after each hundredth of the calls."""
    points = [flat(inference.approx.params)]
    marks = set(np.linspace(0, calls, 101).astype(int)[1:])

    def follow(approx, losses, call):
        bar.update()
        if call in marks:
            points.append(flat(approx.params))

    pm.fit(
        calls,
        method=inference,
        obj_optimizer=rule,
        callbacks=[follow],
        progressbar=False,
    )
    return points


def measure(inference, given, best, calls, bar):
    """List PyMC's estimates of the best ELBO, and what is given to a rule."""
    params = inference.approx.params
    for param, value in zip(params, np.split(best.x, len(params))):
        param.set_value(value)

    elbos, grads = [], []
    for _ in range(calls):
        elbos.append(-float(inference.state.step()))
        grads.append(given.get_value())
        bar.update()
    return np.array(elbos), np.array(grads)


def watched(rule, given):
    """Make a rule also keep the gradient that it is given."""

    def updates(grads, params):
        updates = rule(grads, params)
        updates[given] = pt.concatenate(grads)
        return updates

    return updates


def flat(params):
    """Copy the values of all parameters into one vector."""
    return np.concatenate([param.get_value() for param in params])


# Reporting


def findings(runs, number, best, seed):
    """Say what came out, what accumulation gains and what it does not."""
    plain, accumulated, large, lower = runs.values()
    way = accumulated.way
    means = plain.grads.reshape(-1, way.N, len(best.x)).mean(axis=1)
    apart = abs(accumulated.grads - means).max()
    ratio = variance(accumulated.grads)[0] / variance(plain.grads)[0]
    texts = [
        f"ADVI of {number} rows by Adam, seed {seed}. The best ELBO is "
        f"{-best.fun:.2f}; PyMC's estimates of it: {mean_elbo(plain)}.",
        f"What accumulation gains: the rule got the means of the same "
        f"minibatches' gradients, to {apart:.0e} of {abs(means).max():.0f}. "
        f"They have 1/{way.N} of the variance ({ratio:.3f} measured), with "
        f"{way.batch} rows and one accumulator a parameter in memory. A "
        f"batch of {large.way.batch} rows averages over as many rows, but "
        "takes one Monte Carlo sample for all of them.",
        f"What it does not gain: speed. It takes 1/{way.N} of the steps, and "
        f"comes within {NEAR} nats after {until_near(accumulated)} rows, "
        f"where plain Adam does after {until_near(plain)}. And plain Adam "
        "with a lower learning rate has a quiet end, too: it lacks "
        f"{at_the_end(lower)} nats.",
    ]
    texts = [textwrap.fill(text, 79) for text in texts]
    return "\n\n".join([texts[0], table(runs), *texts[1:]])


def table(runs):
    """Make a Markdown table with a line for each way."""
    header = ["", "learning rate", "rows a call", "steps"]
    header += ["variance of the gradient", "over plain's"]
    header += [
        f"rows seen until within {NEAR} nats",
        "nats lacking at the end",
    ]
    plain, _ = variance(runs["plain"].grads)
    lines = [header, ["---"] * len(header)]
    for name, run in runs.items():
        way, (total, error) = run.way, variance(run.grads)
        lines.append(
            [
                name,
                f"{way.learning_rate:.3g}",
                f"{way.batch}",
                f"{run.steps}",
                f"{total:.0f} ± {error:.0f}",
                f"{total / plain:.3f}",
                until_near(run),
                at_the_end(run),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def variance(grads):
    """Give the total variance of a gradient, and its standard error."""
    squares = ((grads - grads.mean(axis=0)) ** 2).sum(axis=1)
    n = len(squares)
    return squares.sum() / (n - 1), squares.std(ddof=1) / n**0.5


def rows_seen(run):
    """List how many rows were seen until each of the ELBOs."""
    way = run.way
    total = run.steps * way.N * way.batch
    return np.linspace(0, total, len(run.lacks))


def until_near(run):
    """Say how many rows were seen until the ELBO was near the best."""
    near = run.lacks < NEAR
    return f"{rows_seen(run)[near.argmax()]:.0f}" if near.any() else "never"


def at_the_end(run):
    """Put into words what the ELBO lacked in the last fifth of the calls."""
    lacks = run.lacks[-20:]
    return f"{lacks.mean():.2f} ± {lacks.std():.2f}"


def mean_elbo(run):
    """Put PyMC's mean estimate of the best ELBO into words."""
    error = run.elbos.std(ddof=1) / len(run.elbos) ** 0.5
    return f"{run.elbos.mean():.2f} ± {error:.2f}"


def draw(path, runs):
    """Draw what the ELBOs lack, and how much the gradients vary."""
    figure = Figure(figsize=(11, 4.2))
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for name, run in runs.items():
        rate, N, batch = run.way.learning_rate, run.way.N, run.way.batch
        label = f"{name}: {rate:.3g}, {N} x {batch}"
        curves.plot(rows_seen(run) / 1000, run.lacks, lw=1.2, label=label)
    curves.set_yscale("log")
    curves.set_xlabel("rows seen, in thousands")
    curves.set_ylabel("nats lacking to the best ELBO")
    curves.set_title("ELBO of all the data")
    curves.grid(alpha=0.3)
    curves.legend(title="learning rate, rows a step")

    # At the lower rate, plain gradients are the same.
    names = list(runs)[:3]
    totals, errors = np.transpose([variance(runs[n].grads) for n in names])
    bars.bar(names, totals, yerr=errors, capsize=4, color=["C0", "C1", "C2"])
    for place, (total, error) in enumerate(zip(totals, errors)):
        text = f"{total / totals[0]:.3f}"
        bars.annotate(
            text,
            (place, total + error),
            (0, 4),
            textcoords="offset points",
            ha="center",
        )
    bars.margins(y=0.1)
    bars.set_ylabel("total variance, and its standard error")
    bars.set_title("gradient that Adam gets, at the best ELBO")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# The command line


def make_parser():
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, default, said in (
        ("steps", 1000, "steps of the accumulated rule"),
        ("every", 10, "minibatches in each of them"),
        ("batch", 10, "rows in a minibatch"),
    ):
        said = f"{said} ({default})"
        add(f"--{name}", type=positive, default=default, help=said)
    add("--learning-rate", type=float, default=0.02, help="of Adam (0.02)")
    add("--seed", type=int, default=0, help="of minibatches and samples (0)")
    add("--output", default=".", help="folder for the figure (.)")
    return parser


def positive(text):
    """Read a number of things."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main(**vars(make_parser().parse_args()))
