#!/usr/bin/env python
"""Measure the time that each form takes to compile.

Everything is compiled once before, so that Theano finds all its C code in
its cache; then each repeat compiles every form, in an order drawn anew. The
time goes from the loss to the training function: gradients, rule, graph.
"""

import argparse
import gc
import os
import random
import time
from collections import OrderedDict

import models
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

FORMS = ("plain rule", "switch", "lazy", "function")


def main(model_names=("mlp800", "cnn"), rule="adam", repeats=5, output="."):
    """Measure, print a table and the target, draw a chart."""
    models.set_up(output)
    results = OrderedDict()
    for model in model_names:
        results[model] = measure(model, rule, repeats)

    rows = [
        [
            model,
            *(f"{np.median(seconds[form]):.2f}" for form in FORMS),
            *(f"{ratio(seconds, form):.2f}" for form in FORMS[1:]),
        ]
        for model, seconds in results.items()
    ]
    header = ["model", *(f"{form} (s)" for form in FORMS)]
    header += [f"{form} / plain rule" for form in FORMS[1:]]
    print(models.markdown(header, rows))
    compared = [ratio(seconds, "function") for seconds in results.values()]
    models.judge([("compile time, function / plain rule", 1.3, compared)])
    path = os.path.join(output, "compile_time.png")
    draw(path, results, rule)
    print(f"\nDrew the chart to {path}")
    return results


def measure(model, rule, repeats):
    """Time how long each form takes to compile, after a first time."""
    order, drawn = list(FORMS), random.Random(0)
    seconds = {form: [] for form in FORMS}
    for _ in tqdm(range(1 + repeats), desc=model, unit="repeat"):
        drawn.shuffle(order)
        for form in order:
            network = models.build(model)
            gc.collect()
            start = time.perf_counter()
            models.compile_form(form, network, rule, 10)
            seconds[form].append(time.perf_counter() - start)
    return {form: np.array(values[1:]) for form, values in seconds.items()}


def ratio(seconds, form):
    """Give the median over the repeats of a ratio to the plain rule."""
    return np.median(seconds[form] / seconds["plain rule"])


def draw(path, results, rule):
    """Draw a group of bars for each model."""
    figure = Figure(figsize=(2 + 3 * len(results), 4))
    axes = figure.subplots()
    for i, form in enumerate(FORMS):
        heights = [np.median(seconds[form]) for seconds in results.values()]
        places = np.arange(len(results)) + 0.2 * i - 0.3
        bars = axes.bar(places, heights, 0.2, label=form)
        axes.bar_label(bars, [f"{h:.2f}" for h in heights], fontsize=8)
    axes.set_xticks(range(len(results)))
    axes.set_xticklabels(results)
    axes.set_ylabel("seconds to compile")
    axes.set_title(f"Compile time with {rule}, C code cached")
    axes.margins(y=0.1)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def make_parser():
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--models",
        dest="model_names",
        nargs="+",
        type=models.checked_model,
        default=["mlp800", "cnn"],
        help=f"of {list(models.MODELS)}, or any MLP like mlp:784,800,10",
    )
    add("--rule", choices=models.RULES, default="adam")
    add("--repeats", type=int, default=5)
    add("--output", default=".", help="folder for the chart")
    return parser


if __name__ == "__main__":
    main(**vars(make_parser().parse_args()))
