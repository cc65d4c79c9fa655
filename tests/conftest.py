"""What the tests share: quick compilation, and one dtype at a time."""

import os
import signal

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
FLAGS = os.environ.get("THEANO_FLAGS", "")
if WORKER and "compiledir" not in FLAGS:
    # On a shared folder of compiled code, one would wait for the other.
    folder = os.path.join("~", ".theano", WORKER)
    os.environ["THEANO_FLAGS"] = f"{FLAGS},base_compiledir={folder}".strip(",")

# A shell lets what it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

import lasagne_accum  # noqa: F401, I001 - before Theano, which it repairs
import pytest
import theano


@pytest.fixture
def fast_compile(monkeypatch):
    """Compile in a moment: most graphs here run a few times only."""
    monkeypatch.setattr(theano.config, "mode", "FAST_COMPILE")
    # Theano keeps the first default mode it made, whatever is set since.
    mode = theano.compile.mode
    monkeypatch.setattr(mode, "instantiated_default_mode", None)


@pytest.fixture(params=["float32", "float64"])
def floatX(request, monkeypatch):
    """Run with each floating-point dtype as Theano's own."""
    monkeypatch.setattr(theano.config, "floatX", request.param)
    return request.param


@pytest.fixture(params=["switch", "lazy"])
def gate(request):
    """Run with each way to hold a rule back."""
    return request.param
