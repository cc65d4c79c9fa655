#!/usr/bin/env python
"""Measure the time that each form of accumulation takes.

Try::

    python benchmarks/overhead.py
    python benchmarks/overhead.py --models mlp800 --rules adam --peers
    python benchmarks/overhead.py --backend pytensor

All forms run in one process on one thread, and by turns: each round times a
window of every form, in an order drawn anew. A ratio is the median over the
rounds of the ratio within a round, so that what slows the machine for a
while slows both. The quartiles are those of `function`.
"""

import argparse
import gc
import os
import random
import time
from collections import OrderedDict

import models
import numpy as np
import peers as others
from matplotlib.figure import Figure
from tqdm import tqdm

BACKENDS = models.BACKENDS
BASE = "gradients only"
FORMS = [f for f in models.FORMS if f not in (BASE, "microbatch=")]
PEERS = OrderedDict(torch=others.torch_adam, optax=others.optax_adam)
WARM_UP = 2


def main(
    model_names=None,
    rules=models.RULES,
    micro_batches=(1, 10, 100),
    N=10,
    windows=15,
    clock=time.perf_counter,
    split=(500, 50),
    peers=False,
    device="cpu",
    backend="theano",
    mode=None,
    output=".",
):
    """Measure, print tables and targets, draw a chart; return the times."""
    models.set_up(output, device, backend, mode)
    model_names = model_names or supported(models.MODELS, backend)
    libraries = available_peers() if peers else []
    if libraries:
        one_processor()

    results, splits = OrderedDict(), OrderedDict()
    total = len(model_names) * len(rules) * (len(micro_batches) + bool(split))
    with tqdm(total=total, unit="row") as bar:
        for model in model_names:
            for rule in rules:
                bar.set_description(f"{model} {rule}")
                trains = compile_all(model, rule, N, backend)
                if rule == "adam" and model.startswith("mlp"):
                    sizes = models.sizes(model)
                    for library in libraries:
                        trains[library] = PEERS[library](sizes, N)
                for size in micro_batches:
                    batches = models.make_batches(model, size, N)
                    results[model, rule, size] = measure(
                        prepare(trains, batches), windows, clock
                    )
                    bar.update()
                if split:
                    splits[model, rule] = measure(
                        prepare_split(model, rule, *split, backend),
                        windows,
                        clock,
                    )
                    bar.update()

    print(main_table(results, N))
    if split:
        print("\n" + split_table(splits, *split))
    if libraries:
        print("\n" + peer_table(results, libraries))
    models.judge(find_targets(results, splits, libraries))
    path = os.path.join(output, "overhead.png")
    draw(path, results, N)
    print(f"\nDrew the chart to {path}")
    return results


def available_peers():
    """Find the libraries to compare with, and say which are missing."""
    found = []
    for library, load in PEERS.items():
        try:
            load((1, 1), 1)
            found.append(library)
        except ImportError as error:
            print(f"Skipping {library}: {error}\n")
    return found


def one_processor():
    """Hold the process to one processor, for libraries with own threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def supported(names, backend):
    """List the models or forms that a backend does not lack."""
    return [name for name in names if name not in BACKENDS[backend].lacks]


# Measuring


def compile_all(model, rule, N, backend="theano"):
    """Compile each form, with parameters of its own."""
    return OrderedDict(
        (
            form,
            models.compile_form(form, models.build(model, backend), rule, N),
        )
        for form in [BASE, *supported(FORMS, backend)]
        if form != "in_place" or rule == "momentum"
    )


def prepare(trains, batches):
    """Make functions without arguments that run a window each."""
    whole = [tuple(map(np.concatenate, zip(*batches)))]
    return OrderedDict(
        (
            form,
            train.prepare(batches)
            if form in PEERS
            else window(train, whole if form == "whole batch" else batches),
        )
        for form, train in trains.items()
    )


def prepare_split(model, rule, batch, piece, backend="theano"):
    """Prepare one call on a whole batch, and one in pieces."""
    batches = models.make_batches(model, batch, 1)
    return OrderedDict(
        (
            form,
            window(
                models.compile_form(
                    form, models.build(model, backend), rule, piece
                ),
                batches,
            ),
        )
        for form in ("whole batch", "microbatch=")
    )


def window(train, batches):
    """Make a function that trains on some batches."""

    variables = models.shared_variables(train)

    def run():
        for x, y in batches:
            train(x, y)
        models.wait_for(variables)

    return run


def measure(runs, windows, clock=time.perf_counter):
    """Time windows of all forms by turns; return their milliseconds."""
    order, drawn = list(runs), random.Random(0)
    seconds = {form: [] for form in runs}
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP + windows):
        drawn.shuffle(order)
        for form in order:
            start = clock()
            runs[form]()
            seconds[form].append(clock() - start)
    gc.enable()
    return {
        form: 1000 * np.array(values[WARM_UP:])
        for form, values in seconds.items()
    }


# Reporting


def ratios(times, form, base=BASE):
    """Give the quartiles of a ratio, NaNs for what was not measured."""
    if form not in times:
        return np.full(3, np.nan)
    return np.percentile(times[form] / times[base], [25, 50, 75])


def ratio(times, form, base=BASE):
    """Give the median of a ratio, or NaN."""
    return ratios(times, form, base)[1]


def written(number):
    """Put a ratio into words."""
    return "-" if np.isnan(number) else f"{number:.2f}"


def measured_forms(results):
    """List the forms that any of the rows has."""
    return [f for f in FORMS if any(f in times for times in results.values())]


def main_table(results, N):
    """Make a table with a row for each model, rule and micro-batch."""
    forms = measured_forms(results)
    header = ["model", "rule", "micro-batch", f"{BASE} (ms)", *forms]
    header += ["quartiles", "lazy / function", "switch / plain rule"]
    rows = []
    for key, times in results.items():
        low, _, high = ratios(times, "function")
        rows.append(
            [
                *key,
                f"{np.median(times[BASE]) / N:.3f}",
                *(written(ratio(times, form)) for form in forms),
                f"{low:.2f} to {high:.2f}",
                written(ratio(times, "lazy", "function")),
                written(ratio(times, "switch", "plain rule")),
            ]
        )
    return models.markdown(header, rows)


def split_table(splits, batch, piece):
    """Make a table of batches computed at once and in pieces."""
    rows = []
    for key, times in splits.items():
        low, middle, high = ratios(times, "microbatch=", "whole batch")
        whole = np.median(times["whole batch"])
        quartiles = f"{low:.2f} to {high:.2f}"
        rows.append([*key, f"{whole:.2f}", f"{middle:.2f}", quartiles])
    header = ["model", "rule", f"batch of {batch} at once (ms)"]
    header += [f"microbatch={piece}", "quartiles"]
    return models.markdown(header, rows)


def peer_table(results, libraries):
    """Make a table of the libraries' times over those of `function`."""
    rows = [
        [*key, *(written(ratio(times, p, "function")) for p in libraries)]
        for key, times in results.items()
        if libraries[0] in times
    ]
    header = ["model", "rule", "micro-batch"]
    header += [f"{library} / function" for library in libraries]
    return models.markdown(header, rows)


def find_targets(results, splits, libraries):
    """List what is to be reached, with what was measured."""
    mlps = [
        times
        for (model, rule, size), times in results.items()
        if model.startswith("mlp") and rule == "adam" and size == 10
    ]
    targets = [
        (
            "function / gradients only, micro-batches of 10 and more",
            1.05,
            [
                ratio(times, "function")
                for (_, _, size), times in results.items()
                if size >= 10
            ],
        ),
        (
            "lazy / function, Adam, MLPs, micro-batch 10",
            1.15,
            [ratio(times, "lazy", "function") for times in mlps],
        ),
        (
            "switch / plain rule, Adam, MLPs, micro-batch 10",
            1.0,
            [ratio(times, "switch", "plain rule") for times in mlps],
        ),
        (
            "microbatch= / whole batch in time, CNN",
            1.10,
            [
                ratio(times, "microbatch=", "whole batch")
                for (model, _), times in splits.items()
                if model == "cnn"
            ],
        ),
    ]
    return targets + [
        (
            f"function / {library}, Adam, MLPs, micro-batch 10",
            1.0,
            [
                ratio(times, "function", library)
                for times in mlps
                if library in times
            ],
        )
        for library in libraries
    ]


def draw(path, results, N):
    """Draw a panel for each model and micro-batch, a bar for each form."""
    names, rules, sizes = (
        list(OrderedDict.fromkeys(key)) for key in zip(*results)
    )
    forms = measured_forms(results)
    width = 0.8 / len(forms)
    figure = Figure(figsize=(1.5 + 5 * len(sizes), 1.2 + 3.2 * len(names)))
    panels = figure.subplots(len(names), len(sizes), squeeze=False)
    for row, model in zip(panels, names):
        for axes, size in zip(row, sizes):
            for i, form in enumerate(forms):
                heights = [
                    ratio(results[model, rule, size], form) for rule in rules
                ]
                places = np.arange(len(rules)) + (i + 0.5) * width - 0.4
                bars = axes.bar(places, heights, width, label=form)
                labels = ["" if np.isnan(h) else f"{h:.2f}" for h in heights]
                axes.bar_label(
                    bars, labels, rotation=90, fontsize=7, padding=2
                )
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_title(f"{model}, micro-batch {size}")
            axes.set_xticks(range(len(rules)))
            axes.set_xticklabels([rule.replace("_", "\n") for rule in rules])
            axes.margins(y=0.18)
        row[0].set_ylabel("time (gradients only = 1)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.suptitle(f"Time per micro-batch, windows of {N} (lower is faster)")
    figure.legend(handles, labels, loc="lower center", ncol=len(forms))
    bottom = 0.5 / figure.get_figheight()
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=120)


# The command line


def make_parser():
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--models",
        dest="model_names",
        nargs="+",
        type=models.checked_model,
        help=f"of {list(models.MODELS)}, or any MLP like mlp:784,800,10; "
        "by default all that the backend runs",
    )
    add("--rules", nargs="+", choices=models.RULES, default=models.RULES)
    add("--micro-batches", nargs="+", type=int, default=[1, 10, 100])
    add("--N", type=int, default=10, help="micro-batches in a window")
    add("--windows", type=int, default=15, help="to time of each form")
    add(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="count the processor's time, which a busy machine changes less",
    )
    add(
        "--split",
        nargs=2,
        type=int,
        default=[500, 50],
        metavar=("BATCH", "PIECE"),
        help="of the comparison with microbatch=",
    )
    add(
        "--no-split",
        dest="split",
        action="store_const",
        const=None,
        help="leave that comparison out",
    )
    add(
        "--peers",
        action="store_true",
        help="add torch and optax to the MLPs with adam, on one processor",
    )
    add(
        "--device",
        default="cpu",
        help="such as cuda or opencl0:0, on which OpenCL computes MLPs only, "
        "with the squared error for loss",
    )
    add(
        "--backend",
        choices=list(BACKENDS),
        default="theano",
        help="pytensor measures MLPs on the processor, with PyMC's rules",
    )
    add(
        "--mode",
        help="of compilation, such as FAST_RUN, or CVM and NUMBA on PyTensor; "
        "by default the backend's own",
    )
    add("--output", default=".", help="folder for the chart")
    return parser


def parse(words=None):
    """Read the command line; refuse what the backend doesn't run."""
    parser = make_parser()
    options = parser.parse_args(words)
    lacks = BACKENDS[options.backend].lacks
    for model in options.model_names or ():
        if model in lacks:
            parser.error(
                f"--models must be MLPs on {options.backend}, got {model}. "
                "Leave it out, or take --backend theano."
            )
    if options.device != "cpu" and "device" in lacks:
        parser.error(
            f"--device must be cpu on {options.backend}, got "
            f"{options.device}. Leave it out, or take --backend theano."
        )
    return options


if __name__ == "__main__":
    main(**vars(parse()))
