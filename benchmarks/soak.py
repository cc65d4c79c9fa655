#!/usr/bin/env python
"""Train for very long, by all that can happen to a window, and compare.

Try::

    python benchmarks/soak.py
    python benchmarks/soak.py --forms function --calls 100000

Each form is called with random gradients and weights, some of them NaN,
while windows change their size and are flushed or emptied at random. All
along, its counters must be those of the NumPy reference of the tests, and
its parameters equal to the reference's but for rounding; and the memory of
the process must not grow. The exit status is 1 where that is not so.
"""

import argparse
import functools
import os
import random
import sys
from collections import OrderedDict

import lasagne_accum

import models
import numpy as np
import theano
import theano.tensor as T
from tqdm import tqdm

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from forms import FORMS
from reference import RULES, Window

SHAPES = OrderedDict([("b", (5,)), ("W", (4, 5))])
# Parameters of about 10 after so many float64 roundings of their updates.
TOLERANCE = 1e-8
WARM_UP = 0.1
# MiB: a byte for each of a million calls.
GROWTH = 1.0


def main(forms=tuple(FORMS), calls=1000000, rule="adam", seed=0):
    """Soak each form, print what was found; return whether all held."""
    rows, all_hold = [], True
    with tqdm(total=len(forms) * calls, unit="call") as bar:
        for form in forms:
            bar.set_description(form)
            row, holds = soak(form, calls, rule, seed, bar.update)
            rows.append([form, *row, "yes" if holds else "NO"])
            all_hold = all_hold and holds

    header = ["form", "calls", "updates", "skipped", "largest difference"]
    header += ["memory (MiB)", "growth (MiB)", "standard error", "holds"]
    print(models.markdown(header, rows))
    return all_hold


def soak(form, calls, rule, seed, tick=lambda calls: None):
    """Run one form beside the reference; return a row, and if all held."""
    subject, model, params = build(form, rule)
    drawn, rng = random.Random(seed), np.random.RandomState(seed)
    block = max(calls // 200, 1)
    memory, difference, alike = [], 0.0, True
    for start in range(0, calls, block):
        for _ in range(min(block, calls - start)):
            alike &= happen(subject, model, drawn, rng)
        tick(min(block, calls - start))
        memory.append(resident())
        difference = max(
            difference,
            *(
                np.max(abs(param.get_value() - value))
                for param, value in zip(params, model.params)
            ),
        )

    growth, noise = trend(memory[int(WARM_UP * len(memory)) :])
    row = [calls, model.steps, model.skipped, f"{difference:.1e}"]
    row += [f"{memory[-1]:.1f}", f"{growth:.2f}", f"{noise:.2f}"]
    return row, alike and difference <= TOLERANCE and growth <= GROWTH


def build(form, rule):
    """Make a form, the reference, and the parameters of the form."""
    theano.config.floatX = "float64"
    params = [
        theano.shared(np.ones(shape), name) for name, shape in SHAPES.items()
    ]
    update_fn = getattr(lasagne_accum.updates, rule)
    subject = FORMS[form](
        [param.type() for param in params],
        params,
        T.scalar("weight", "float64"),
        functools.partial(update_fn, learning_rate=1e-3),
        mode=None,
        skip_nonfinite=True,
    )
    subject.set_N(1)
    reference, defaults = RULES[rule]
    hyper = dict(defaults, learning_rate=1e-3)
    values = [param.get_value() for param in params]
    model = Window(values, reference, 1, skip_nonfinite=True, **hyper)
    return subject, model, params


def happen(subject, model, drawn, rng):
    """Let one thing happen to both; return whether they stayed alike."""
    event = drawn.random()
    if event < 0.01:
        model.N = drawn.randint(1, 300)
        subject.set_N(model.N)
    if event < 0.02:
        return subject.flush() == model.flush()
    if event < 0.025:
        subject.reset()
        model.reset()

    grads = [rng.standard_normal(shape) for shape in SHAPES.values()]
    weight = drawn.choice([0.0, 1.0, 2.5, 7.0])
    if drawn.random() < 0.05:
        grads[1][1, 2] = drawn.choice([np.nan, np.inf, -np.inf])
    updated = subject.call(grads, weight) == model.call(grads, weight)
    counted = subject.pending == model.pending
    return updated and counted and subject.skipped == model.skipped


def resident():
    """Tell how much memory the process takes now, in MiB."""
    with open("/proc/self/statm") as stream:
        pages = int(stream.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def trend(memory):
    """Fit a line; return its rise in all, and that rise's standard error."""
    if len(memory) < 3:
        return 0.0, 0.0
    along = np.linspace(-0.5, 0.5, len(memory))
    slope = np.dot(along, memory) / np.dot(along, along)
    rest = memory - np.mean(memory) - slope * along
    variance = np.dot(rest, rest) / (len(memory) - 2)
    return slope, np.sqrt(variance / np.dot(along, along))


def make_parser():
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    add("--calls", type=int, default=1000000, help="of each form")
    add("--rule", choices=sorted(RULES), default="adam")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(not main(**vars(make_parser().parse_args())))
