"""What the tests share: quick compilation, and one dtype at a time."""

import os
import signal

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
for name in ("THEANO", "PYTENSOR"):
    flags = os.environ.get(f"{name}_FLAGS", "")
    if WORKER and "compiledir" not in flags:
        # On a shared folder of compiled code, one would wait for the other.
        folder = os.path.join("~", f".{name.lower()}", WORKER)
        flags = f"{flags},base_compiledir={folder}".strip(",")
        os.environ[f"{name}_FLAGS"] = flags

# A shell lets what it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from backend import theano

# Or what these tests start, the workers too, could not have the GPU.
os.environ.pop("THEANO_GPU_IS_ALREADY_ACTIVE", None)

CXX = theano.config.cxx


@pytest.fixture
def fast_compile(monkeypatch):
    """Compile in a moment, without C: most graphs here run a few times."""
    monkeypatch.setattr(theano.config, "mode", "FAST_COMPILE")
    # Even that mode compiles what it folds constants with.
    monkeypatch.setattr(theano.config, "cxx", "")
    # Theano keeps the first default mode it made, whatever is set since.
    mode = theano.compile.mode
    monkeypatch.setattr(mode, "instantiated_default_mode", None, raising=False)


@pytest.fixture
def in_c(fast_compile, monkeypatch):
    """Let modes that compile to C do so."""
    monkeypatch.setattr(theano.config, "cxx", CXX)


@pytest.fixture
def floatX():
    """Give Theano's own floating-point dtype, which `make test-all` varies."""
    return theano.config.floatX


@pytest.fixture(params=["switch", "lazy"])
def gate(request):
    """Run with each way to hold a rule back."""
    return request.param
