"""Which backend variables belong to, and what is asked of it."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import lasagne_accum
from lasagne_accum import _backend, state

import numpy as np
import pytest
from backend import NAME, T, rules, theano, theano_only


class Foreign:
    """What takes itself for a variable of another backend."""

    def __str__(self):
        return "x"


OTHER = "pytensor" if NAME == "theano" else "theano"
Foreign.__module__ = f"{OTHER}.tensor.variable"
MIXED = (
    "`params` and all that goes with them must be of one backend, got w of "
    f"{NAME} and x of {OTHER}. Build the whole graph with one of them."
)


def test_importing_the_package_imports_no_backend():
    script = (
        "import sys, lasagne_accum; "
        "assert not {'theano', 'aesara', 'pytensor', 'lasagne', 'pymc'} "
        "& set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_drop_in_module_says_that_it_needs_lasagne(monkeypatch):
    monkeypatch.setitem(sys.modules, "lasagne", None)
    monkeypatch.delitem(sys.modules, "lasagne_accum.updates", raising=False)

    with pytest.raises(ImportError) as caught:
        importlib.import_module("lasagne_accum.updates")

    assert str(caught.value) == (
        "`lasagne_accum.updates` must find Lasagne, whose rules it wraps, got "
        f"{caught.value.__cause__}. Install lasagne_accum[lasagne], or pass "
        "PyMC's rules to `accumulated`."
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (lasagne_accum.with_accumulated_gradients, {"learning_rate": None}),
        (lasagne_accum.with_accumulated_gradients, {"weight": None}),
        (lasagne_accum.with_accumulated_gradients, {"N": None}),
        (lasagne_accum.with_accumulated_gradients, {"loss_or_grads": [None]}),
        (lasagne_accum.accumulate_gradients, {"weight": None}),
        (lasagne_accum.function, {"inputs": [None]}),
        (lasagne_accum.function, {"outputs": None}),
        (lasagne_accum.function, {"updates": {None: 1}}),
        (lasagne_accum.function, {"givens": [(1, None)]}),
    ],
)
def test_variables_of_two_backends_are_refused(form, options):
    w = theano.shared(np.ones(2), "w")
    kw = {"loss_or_grads": (w**2).sum(), "params": [w]}
    if form is not lasagne_accum.accumulate_gradients:
        kw.update(N=2, update_fn=rules.sgd)
    if form is lasagne_accum.function:
        kw.update(inputs=[], outputs=None)
    kw.update(with_foreign(options))

    with pytest.raises(TypeError) as caught:
        form(**kw)

    assert str(caught.value) == MIXED


def with_foreign(value):
    """Put what takes itself for a variable in the place of each None."""
    if value is None:
        return Foreign()
    if isinstance(value, dict):
        pairs = value.items()
        return {key or Foreign(): with_foreign(item) for key, item in pairs}
    if isinstance(value, (list, tuple)):
        return type(value)(map(with_foreign, value))
    return value


def test_without_a_variable_it_is_the_backend_that_was_imported():
    assert isinstance(_backend.of([3]).shared(1.0), type(theano.shared(1.0)))


# What the other backends have, where these tests run on Theano alone.


def test_static_shapes_are_kept_where_types_state_them():
    kind = SimpleNamespace(shape=(None, 1))
    variable = SimpleNamespace(type=kind, broadcastable=(False, True))
    backend = _backend.Backend(NAME)

    assert backend._pattern(variable) == {"shape": (None, 1)}


@pytest.mark.parametrize(
    ("config", "linker", "expected"),
    [
        (SimpleNamespace(), SimpleNamespace(jit_compile=None), True),
        (SimpleNamespace(blas__ldflags="-lblas"), SimpleNamespace(), "-lblas"),
        (SimpleNamespace(blas__ldflags=""), SimpleNamespace(), ""),
    ],
)
def test_a_blas_is_not_searched_where_none_is_linked(config, linker, expected):
    mode = SimpleNamespace(
        get_default_mode=lambda: SimpleNamespace(linker=linker)
    )
    backend = _backend.Backend(NAME)
    backend._name = "pytensor"
    backend._root = SimpleNamespace(
        config=config, compile=SimpleNamespace(mode=mode)
    )

    assert backend._links_blas_or_needs_none() == expected


@theano_only
def test_a_condition_for_ifelse_is_the_identity_only_in_theano():
    condition, w = T.eq(T.iscalar(), 0), theano.shared(1.0)
    backend = _backend.Backend(NAME)
    assert "LazyCondition" in theano.printing.debugprint(
        backend.ifelse(condition, [w], [2 * w])[0], file="str"
    )

    backend._name = "aesara"
    assert "LazyCondition" not in theano.printing.debugprint(
        backend.ifelse(condition, [w], [2 * w])[0], file="str"
    )


ALGORITHMS = ["PCG64", "MT19937", "Philox", "SFC64"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_generators_of_numpy_go_on_from_a_state(algorithm, tmp_path):
    one, other = (
        theano.shared(np.random.Generator(getattr(np.random, algorithm)(seed)))
        for seed in (1, 2)
    )
    generator = one.get_value(borrow=True)
    generator.normal(size=3)
    generator.integers(5, dtype="int32")

    np.savez(tmp_path / "state.npz", **state.read([one]))
    state.restore([other], np.load(tmp_path / "state.npz"))

    expected = generator.normal(size=1000)
    restored = other.get_value(borrow=True)
    np.testing.assert_array_equal(restored.normal(size=1000), expected)


def test_streams_that_move_when_compiled_are_self_updating():
    stream = theano.shared(np.random.default_rng(1), "stream")
    w = theano.shared(1.0, "w")

    assert _backend.of(w).self_updating([stream, w]) == [stream]
