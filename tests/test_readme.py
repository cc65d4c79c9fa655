"""The README's code runs, and the version is told once."""

import re
import subprocess
import sys
from pathlib import Path

import lasagne_accum

ROOT = Path(__file__).parent.parent


def blocks(language):
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_python_blocks_run_in_order_and_print_what_they_say(
    tmp_path, monkeypatch, capsys, fast_compile
):
    monkeypatch.chdir(tmp_path)
    namespace = {}

    for block in blocks("python"):
        exec(block, namespace)
        said = re.findall(r"print\(.*\)  # (.*)$", block, re.M)
        printed = capsys.readouterr().out.splitlines()
        assert printed[len(printed) - len(said) :] == said

    assert (tmp_path / "training.npz").exists()


def test_shell_blocks_name_what_is_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lines = "".join(blocks("sh")).splitlines()

    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    scripts = [
        line.split()[1] for line in lines if line.split()[0].endswith("python")
    ]
    gpu = ["test-gpu", "test-gpu"]
    assert targets == ["mnist", "test", "test-pymc", *gpu]
    assert all(f"\n{name}:" in makefile for name in targets)
    assert scripts
    assert all((ROOT / name).exists() for name in scripts)


def test_changes_package_and_metadata_tell_the_same_version():
    changes = (ROOT / "CHANGES.md").read_text("utf-8")

    top = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", changes, re.M)
    metadata = subprocess.check_output(
        [sys.executable, "setup.py", "--version"], cwd=str(ROOT), text=True
    )

    assert top.group(1) == lasagne_accum.__version__
    assert metadata.split()[-1] == lasagne_accum.__version__
