#!/usr/bin/env python
"""Measure the memory that each form of accumulation needs.

Each form trains on one effective batch in a process of its own. What the
parameters, the rule and the window hold is counted exactly, and resident
before the first call. The temporary memory is measured twice:

- resident: how far the process's peak (VmHWM) rises above what it held right
  before the first call, with the allocator told to give back what is freed.
  Right to some hundred kilobytes: libraries load code and make buffers in
  the first call.
- arrays: how far the sum of all arrays and objects (tracemalloc) rises in a
  second window. Exact, but blind to what libraries allocate by themselves.

The peak of a form is its accumulators and its temporary memory.
"""

import argparse
import concurrent.futures
import ctypes
import gc
import multiprocessing
import os
import tracemalloc
from collections import OrderedDict

import models
from matplotlib.figure import Figure
from tqdm import tqdm

# Each form, with the rule of the command line or its own.
FORMS = OrderedDict(
    [
        ("plain rule", ("plain rule", None)),
        ("switch", ("switch", None)),
        ("lazy", ("lazy", None)),
        ("function", ("function", None)),
        ("microbatch=", ("microbatch=", None)),
        ("plain momentum", ("plain rule", "momentum")),
        ("function in_place", ("in_place", "momentum")),
    ]
)
BASES = {"function in_place": "plain momentum", "plain momentum": None}


def main(
    model_names=("cnn", "mlp800"),
    batch=500,
    pieces=(500, 100, 50, 10, 1),
    forms=tuple(FORMS),
    rule="adam",
    output=".",
):
    """Measure, print tables and targets, draw a chart; return the bytes."""
    models.set_up(output)
    if any(batch % piece for piece in pieces):
        raise ValueError(
            f"`pieces` must divide the batch of {batch}, got {pieces}."
        )
    forms = with_bases(forms)
    jobs = [
        (model, piece, form)
        for model in model_names
        for piece in pieces
        for form in forms
    ]
    results = OrderedDict()
    for job in tqdm(jobs, unit="process"):
        results[job] = in_own_process(measure, *job, batch, rule)

    print(held_table(results, model_names, pieces, forms))
    for kind in ("resident", "arrays"):
        print(f"\nPeak of a batch of {batch}, {kind} (MiB):\n")
        print(peak_table(results, kind, model_names, pieces, forms))
    models.judge(find_targets(results, batch))
    path = os.path.join(output, "memory.png")
    draw(path, results, model_names, pieces, forms, batch)
    print(f"\nDrew the chart to {path}")
    return results


def with_bases(forms):
    """Add the plain rules that the forms are compared with."""
    bases = [BASES.get(form, "plain rule") for form in forms]
    return [form for form in FORMS if form in forms or form in bases]


# Measuring


def in_own_process(function, *args):
    """Call a function in a process that ends with it."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *args).result()


def measure(model, piece, form, batch, rule):
    """Train on one batch; return the bytes that it took."""
    form, own_rule = FORMS[form]
    network = models.build(model)
    split = form == "microbatch="
    train = models.compile_form(
        form, network, own_rule or rule, piece if split else batch // piece
    )
    size = batch if split else piece
    batches = models.make_batches(model, size, batch // size)
    variables = models.shared_variables(train)

    give_back_freed_memory()
    make_resident(variables)
    before = start_new_peak()
    run(train, batches)
    resident = memory("VmHWM") - before

    tracemalloc.start()
    make_resident(variables)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    run(train, batches)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "parameters": nbytes(network.params),
        "held": nbytes(v for v in variables if v.ndim),
        "resident": resident,
        "arrays": peak - before,
    }


def run(train, batches):
    """Train on some batches, and keep nothing."""
    for x, y in batches:
        train(x, y)


def give_back_freed_memory():
    """Let the allocator map larger arrays one by one (glibc only)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
        libc.mallopt(m_mmap_threshold, 2**16)
        libc.mallopt(m_trim_threshold, 2**16)
        libc.mallopt(m_mmap_max, 2**20)


def make_resident(variables):
    """Write all variables, since zeros take no memory until then."""
    for variable in variables:
        variable.set_value(variable.get_value(), borrow=True)


def start_new_peak():
    """Let the peak start from what this process holds, and return that."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return memory("VmHWM")


def memory(field):
    """Return what this process held at most, in bytes."""
    with open("/proc/self/status") as stream:
        fields = dict(line.split(":", 1) for line in stream)
    return 1024 * int(fields[field].split()[0])


def nbytes(variables):
    """Return the bytes that shared variables hold."""
    return sum(v.get_value(borrow=True).nbytes for v in variables)


# Reporting


def accumulators(results, model, piece, form):
    """Return the bytes that a form holds beyond those of the plain rule."""
    base = results.get((model, piece, BASES.get(form, "plain rule")))
    if base is None:
        return 0
    return results[model, piece, form]["held"] - base["held"]


def peak(results, kind, model, piece, form):
    """Return accumulators and temporary memory in bytes."""
    temporary = results[model, piece, form][kind]
    return accumulators(results, model, piece, form) + temporary


def held_table(results, names, pieces, forms):
    """Make a table of the bytes of parameters and accumulators."""
    # In a window of one micro-batch, some forms need no accumulators.
    piece = min(pieces)
    rows = [
        [
            model,
            f"{results[model, piece, forms[0]]['parameters']:,}",
            *(f"{accumulators(results, model, piece, f):,}" for f in forms),
        ]
        for model in names
    ]
    header = ["model", "parameters (bytes)"]
    return models.markdown([*header, *(f"of {f}" for f in forms)], rows)


def peak_table(results, kind, names, pieces, forms):
    """Make a table with a row for each model and piece."""
    rows = [
        [
            model,
            str(piece),
            *(
                f"{peak(results, kind, model, piece, form) / 2**20:.2f}"
                for form in forms
            ),
        ]
        for model in names
        for piece in pieces
    ]
    return models.markdown(["model", "pieces of", *forms], rows)


def find_targets(results, batch):
    """List what is to be reached, with what was measured."""
    targets = [
        (
            f"accumulators of {form} / parameters, off by",
            0,
            [
                abs(
                    accumulators(results, *key) / measured["parameters"]
                    - (form != "function in_place")
                )
                for key, measured in results.items()
                if key[2] == form and key[1] < batch
            ],
        )
        for form in ("switch", "lazy", "function", "function in_place")
    ]
    for kind in ("resident", "arrays"):
        whole = results.get(("cnn", batch, "plain rule"))
        piece = results.get(("cnn", 50, "microbatch="))
        targets.append(
            (
                f"microbatch=50 / batch of {batch}, temporary, CNN, {kind}",
                0.15,
                [piece[kind] / whole[kind]] if whole and piece else [],
            )
        )
        targets.append(
            (
                f"function - plain rule, over parameters, {kind}",
                1.02,
                [
                    peak_over_plain(results, kind, *key[:2])
                    for key in results
                    if key[2] == "function" and key[1] < batch
                ],
            )
        )
    return targets


def peak_over_plain(results, kind, model, piece):
    """Give what `function` takes beyond the plain rule, in parameters."""
    more = peak(results, kind, model, piece, "function") - peak(
        results, kind, model, piece, "plain rule"
    )
    return more / results[model, piece, "function"]["parameters"]


def draw(path, results, names, pieces, forms, batch):
    """Draw a panel for each model, a line for each form."""
    figure = Figure(figsize=(1 + 5 * len(names), 4.5))
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    # Lines may lie on one another: their markers and dashes tell them apart.
    markers, lines = "osv^Dx+", ["-", "--", "-.", ":"]
    for axes, model in zip(panels, names):
        for i, form in enumerate(forms):
            axes.plot(
                pieces,
                [
                    peak(results, "resident", model, piece, form) / 2**20
                    for piece in pieces
                ],
                label=form,
                marker=markers[i % 7],
                linestyle=lines[i % 4],
                fillstyle="none",
            )
        axes.set_xscale("log")
        axes.set_xticks(pieces)
        axes.set_xticks([], minor=True)
        axes.set_xticklabels(map(str, pieces))
        axes.set_ylim(bottom=0)
        axes.set_title(f"{model}, batch of {batch}")
        axes.set_xlabel("samples in a micro-batch or piece")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accumulators and temporary memory (MiB)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(forms))
    figure.tight_layout(rect=(0, 0.08, 1, 1))
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
        default=["cnn", "mlp800"],
        help=f"of {list(models.MODELS)}, or any MLP like mlp:784,800,10",
    )
    add("--batch", type=int, default=500, help="the effective batch")
    add("--pieces", nargs="+", type=int, default=[500, 100, 50, 10, 1])
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    add(
        "--rule",
        choices=models.RULES,
        default="adam",
        help="of all forms but those named after momentum",
    )
    add("--output", default=".", help="folder for the chart")
    return parser


if __name__ == "__main__":
    main(**vars(make_parser().parse_args()))
