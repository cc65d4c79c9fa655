"""The results of 2017 are repeated as the script says that it does."""

import importlib
import json
import os
import sys

import lasagne_accum  # noqa: F401 - before Theano, which it repairs

import lasagne
import numpy as np
import pytest
import scipy.stats
import theano

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = "custom_mlp:0,1,0,0"


@pytest.fixture
def script(monkeypatch, fast_compile):
    """Import the script, for children too; what it sets is put back."""
    for module in ("matplotlib", "mlxtend", "tqdm"):
        pytest.importorskip(module)
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = os.environ.get("THEANO_FLAGS", "") + ",mode=FAST_COMPILE,cxx="
    monkeypatch.setenv("THEANO_FLAGS", flags.strip(","))
    monkeypatch.syspath_prepend(os.path.join(ROOT, "examples"))
    monkeypatch.setattr(theano.config, "floatX", "float32")
    rng = lasagne.random.get_rng()
    yield importlib.import_module("reproduce_2017")
    lasagne.random.set_rng(rng)
    for name in ("reproduce_2017", "mnist"):
        del sys.modules[name]


def tiny_rows(script):
    return [
        script.Row(2, 1, 6, 2, 0.01, 0.9, 2.0, 50.0),
        script.Row(1, 3, 6, 2, 0.01, 0.9, 2.0, 50.0),
    ]


@pytest.mark.parametrize("floatX", ["float32", "float64"])
def test_a_row_and_its_control_differ_by_rounding(script, floatX):
    row = script.Row(2, 5, 100, 11, 0.01, 0.9, 2.0, 50.0)

    result = script.train_row(row, 1, floatX, model=MODEL)

    differences = result["differences"]
    assert list(differences) == ["1", "10", "100", "220"]
    # A softmax has no kinks, so that roundings grow no faster than momentum.
    eps = np.finfo(floatX).eps
    assert 0 < differences["1"] < 4 * eps
    assert differences["220"] < 220 * 10 * eps
    assert abs(result["loss"] - result["control_loss"]) < 2200 * eps
    assert 50 < result["accuracy"] == result["control_accuracy"] < 100


def test_a_row_is_trained_by_nesterovs_momentum_on_a_new_order(script):
    row = script.Row(3, 1, 4, 2, 0.05, 0.75, 2.0, 50.0)
    (images, labels), _, (test_images, test_labels) = script.mnist.load_data()

    result = script.train_row(row, 7, model=MODEL)

    W = np.zeros((784, 10))
    lasagne.random.set_rng(np.random.RandomState(7))
    W = lasagne.init.GlorotUniform().sample((784, 10)).astype("float64")
    params, speed = [W, np.zeros(10)], [0, 0]
    rng = np.random.RandomState(7)
    for _ in range(2):
        order = rng.permutation(4000)[:12].reshape(4, 3)
        for part in order:
            x = images[part].reshape(3, 784).astype("float64")
            errors = softmax(x.dot(params[0]) + params[1])
            errors[np.arange(3), labels[part]] -= 1
            grads = [x.T.dot(errors) / 3, errors.mean(axis=0)]
            for i, grad in enumerate(grads):
                speed[i] = 0.75 * speed[i] - 0.05 * grad
                params[i] = params[i] + 0.75 * speed[i] - 0.05 * grad
    x = test_images.reshape(500, 784)
    predicted = softmax(x.dot(params[0]) + params[1])
    loss = -np.log(predicted[np.arange(500), test_labels]).mean()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    right = predicted.argmax(axis=1) == test_labels
    assert result["accuracy"] == pytest.approx(100 * right.mean())
    assert set(result) == {"loss", "accuracy"}


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_it_goes_on_from_the_lines_that_are_whole(script, tmp_path, capsys):
    folder = tmp_path / "new"
    rows, path = tiny_rows(script), folder / "reproduce_2017.jsonl"

    results = script.main(rows, 2, jobs=2, output=str(folder), model=MODEL)

    jobs = [(0, 0, "float32"), (1, 0, "float32"), (1, 0, "float64")]
    jobs += [(0, 1, "float32"), (1, 1, "float32")]
    assert [tuple(job) for job in results] == jobs
    lines = path.read_text().splitlines(True)
    assert len(lines) == 5
    assert {json.loads(line)["floatX"] for line in lines} == {
        "float32",
        "float64",
    }
    assert (folder / "reproduce_2017.png").read_bytes()[1:4] == b"PNG"
    printed = capsys.readouterr().out
    assert "| 1 (3), 0.01, 0.9, 2 epochs | float64 |" in printed

    # A whole line that is trained again would be another number of lines.
    path.write_text("".join(lines[:4]) + lines[4][:50])
    again = script.main(rows, 2, jobs=1, output=str(folder), model=MODEL)
    assert path.read_text().splitlines(True)[:4] == lines[:4]
    assert len(path.read_text().splitlines()) == 5
    for job, line in again.items():
        assert line == results[job]

    # Other rows, and other digits, are other trainings.
    other = [rows[0]._replace(learning_rate=0.02)]
    assert script.read_results(str(path), other, None) == {}
    assert script.read_results(str(path), rows, "a folder") == {}


def test_a_training_that_fails_stops_the_script(script, tmp_path):
    rows = tiny_rows(script)
    with pytest.raises(script.mnist.Refused, match="cannot read"):
        script.main(rows, 1, "no folder", output=str(tmp_path), model=MODEL)


def test_tables_say_what_the_results_are(script):
    rows = tiny_rows(script)
    results = {}
    for seed, (loss, accuracy, control) in enumerate(
        [(0.25, 90.0, 91.0), (None, 92.0, 92.5), (0.75, 94.0, 93.5)]
    ):
        results[script.Job(0, seed, "float32")] = {
            "loss": 0.5,
            "accuracy": accuracy,
        }
        results[script.Job(1, seed, "float32")] = {
            "loss": loss,
            "accuracy": accuracy,
            "control_loss": 0.5,
            "control_accuracy": control,
            "differences": {"1": 1e-9, "4": None if seed else 0.5},
        }
    p = scipy.stats.ttest_rel([90, 92, 94], [91, 92.5, 93.5]).pvalue
    table = script.accuracy_table(rows, results)
    assert "| 0.500 ± 0.000 | - | 50.00 | 92.00 ± 2.00 | - | - |" in table
    assert f"| 92.33 ± 1.26 | {p:.2f} |" in table
    assert "| 2.000 | nan ± nan | 0.500 ± 0.000 |" in table
    table = script.difference_table(rows, results)
    assert table.endswith(
        "| 1 (3), 0.01, 0.9, 2 epochs | float32 | 1.0e-09 | not finite |"
    )
    assert script.paired_test(np.array([1, 2]), np.array([1, 2])) == 1


def test_a_summed_parameter_loses_its_step(script, capsys):
    errors = script.summing(Ns=(2, 127), ratios=(1, 1000))

    # Rounding a parameter p by eps / 2 is all that is wrong with our step.
    eps = np.finfo("float32").eps
    for (N, ratio), (_, ours) in errors.items():
        assert ours < (ratio / 0.01 + N + 4) * eps
    assert errors[127, 1000][0] > 0.1 > 10 * errors[127, 1000][1]
    assert "| 127 | 1000 |" in capsys.readouterr().out


def test_the_rows_are_those_that_were_posted(script):
    assert len(script.ROWS) == 9
    assert [row.average for row in script.ROWS] == [1] * 3 + [10] + [5] * 5
    assert script.ROWS[7].posted_accuracy == 97.97
    assert {row.calls for row in script.ROWS} == {100}
