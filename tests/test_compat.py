"""What `import lasagne_accum` repairs, and what it leaves alone."""

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

from lasagne_accum import _compat

import numpy
import pytest

ROOT = Path(_compat.__file__).parents[1]
DOWNSAMPLE = "theano.tensor.signal.downsample"
SCAN_EXTENSION = "theano.scan_module.scan_perform_ext"
DDOT = """
extern "C" double ddot_(int *n, double *x, int *dx, double *y, int *dy) {
    double sum = 0;
    for (int i = 0; i < *n; i++) sum += x[i * *dx] * y[i * *dy];
    return sum;
}
"""


def python(*args, **env):
    """Run this interpreter with arguments; return what it prints."""
    env = dict(os.environ, **{k: str(v) for k, v in env.items()})
    done = subprocess.run(
        [sys.executable, *args],
        cwd=str(ROOT),
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture
def bare_sys(monkeypatch):
    """Show `_compat` an interpreter that has imported nothing."""
    bare = types.SimpleNamespace(
        modules={}, meta_path=[], version_info=(3, 10)
    )
    monkeypatch.setattr(_compat, "sys", bare)
    return bare


@pytest.fixture
def blas_config(monkeypatch):
    """Return NumPy's build configuration without `blas_opt_info`."""
    config = importlib.import_module("numpy.distutils.__config__")
    monkeypatch.delattr(config, "blas_opt_info", raising=False)
    return config


def finders(meta_path):
    return [type(f).__name__ for f in meta_path].count("DownsampleFinder")


# In a process of its own: order of imports, and the environment.


def test_theano_and_lasagne_import_after_lasagne_accum():
    code = "import lasagne_accum, theano, lasagne; print(lasagne.__version__)"
    assert python("-c", code)[0].startswith("0.")


def test_lasagne_imports_where_theano_came_first():
    code = "import theano, lasagne_accum, lasagne; print(lasagne.__version__)"
    out, _ = python("-c", code, THEANO_FLAGS="blas.ldflags=")
    assert out.startswith("0.")


def test_importing_imports_neither_theano_nor_lasagne():
    code = "import sys, lasagne_accum; print({'theano', 'lasagne'} & {*%s})"
    assert python("-c", code % "sys.modules")[0] == "set()"


@pytest.mark.parametrize("action", ["always", "error"])
def test_importing_warns_of_nothing(action):
    assert python("-W", action, "-c", "import lasagne_accum") == ("", "")


def test_importing_leaves_the_warning_filters_alone():
    code = (
        "import warnings, numpy; before = warnings.filters[:];"
        "import lasagne_accum; print(warnings.filters == before)"
    )
    assert python("-c", code)[0] == "True"


def test_importing_without_theano_changes_nothing(tmp_path):
    site = Path(numpy.__file__).parents[1]
    for name in ["numpy", "numpy.libs"]:
        (tmp_path / name).symlink_to(site / name)
    code = (
        "import sys, numpy; before = sys.meta_path[:]; import lasagne_accum;"
        "print(sys.meta_path == before, 'numpy.distutils' in sys.modules)"
    )
    assert python("-S", "-c", code, PYTHONPATH=tmp_path)[0] == "True False"


def test_real_downsample_wins(tmp_path):
    package = tmp_path
    for name in DOWNSAMPLE.split(".")[:-1]:
        package = package / name
        package.mkdir()
        (package / "__init__.py").touch()
    (package / "downsample.py").touch()
    code = "import lasagne_accum, %s as real; print(real.__file__)"
    out, _ = python("-c", code % DOWNSAMPLE, PYTHONPATH=tmp_path)
    assert out == str(package / "downsample.py")


@pytest.mark.parametrize("where", ["THEANO_FLAGS", "THEANORC"])
def test_users_own_ldflags_stay(tmp_path, where):
    rc = tmp_path / "theanorc"
    rc.write_text("[blas]\nldflags = -lm\n")
    value = {"THEANO_FLAGS": "blas.ldflags=-lm", "THEANORC": rc}[where]
    code = "import lasagne_accum, theano; print(theano.config.blas.ldflags)"
    assert python("-c", code, **{where: value})[0] == "-lm"


@pytest.mark.skipif(
    tuple(map(int, numpy.__version__.split(".")[:2])) < (1, 22),
    reason="this NumPy tells Theano what it was linked to itself",
)
def test_theano_links_a_blas_where_there_is_one(tmp_path):
    (tmp_path / "libopenblas.so").touch()
    (tmp_path / "blas.cc").write_text(DDOT)
    build = ["g++", "-shared", "-fPIC", "blas.cc", "-o", "libblas.so"]
    subprocess.run(build, cwd=str(tmp_path), check=True)
    code = "import lasagne_accum, theano; print(theano.config.blas.ldflags)"
    out, _ = python(
        "-c", code, LIBRARY_PATH=tmp_path, LD_LIBRARY_PATH=tmp_path
    )
    assert out == "-lblas"


def test_theano_links_no_blas_where_there_is_none(tmp_path):
    program = 'extern "C" void ddot_(); int main() { ddot_(); }'
    command = [
        "g++",
        "-x",
        "c++",
        "-",
        "-o",
        str(tmp_path / "a.out"),
        "-lblas",
    ]
    links = subprocess.run(
        command, input=program.encode(), stderr=subprocess.DEVNULL
    )
    code = "import lasagne_accum, theano; print(theano.config.blas.ldflags)"
    out, _ = python("-c", code)
    assert bool(out) is (links.returncode == 0)


# In this process: each repair by itself.


def test_repair_is_idempotent(bare_sys):
    _compat.repair()
    _compat.repair()
    assert finders(bare_sys.meta_path) == 1


def test_reloading_adds_no_second_finder():
    importlib.reload(_compat)
    assert finders(sys.meta_path) == 1


def test_repair_does_nothing_without_theano(bare_sys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _compat.repair()
    assert (bare_sys.modules, bare_sys.meta_path) == ({}, [])


def test_repair_helps_a_theano_that_only_sys_modules_knows(
    bare_sys, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bare_sys.modules["theano"] = object()
    _compat.repair()
    assert finders(bare_sys.meta_path) == 1


@pytest.mark.parametrize(
    ("version", "modules"),
    [((3, 7), {}), ((3, 10), {}), ((3, 11), {SCAN_EXTENSION: None})],
)
def test_scan_extension_is_skipped_from_python_311_on(
    bare_sys, version, modules
):
    bare_sys.version_info = version
    _compat.repair()
    assert bare_sys.modules == modules


def test_scan_extension_that_works_stays(bare_sys):
    bare_sys.modules[SCAN_EXTENSION] = extension = object()
    _compat.skip_scan_extension()
    assert bare_sys.modules[SCAN_EXTENSION] is extension


def test_missing_blas_info_is_put_back_empty(blas_config):
    _compat.restore_blas_info()
    assert blas_config.blas_opt_info == {}


def test_blas_info_of_numpy_stays(blas_config, monkeypatch):
    info = {"libraries": ["openblas"]}
    monkeypatch.setattr(blas_config, "blas_opt_info", info, raising=False)
    _compat.restore_blas_info()
    assert blas_config.blas_opt_info is info


def test_numpy_without_distutils_is_left_alone(blas_config, monkeypatch):
    monkeypatch.setitem(sys.modules, blas_config.__name__, None)
    _compat.restore_blas_info()
    assert not hasattr(blas_config, "blas_opt_info")


def test_finder_comes_last(bare_sys):
    bare_sys.meta_path.append(object())
    _compat.offer_downsample()
    assert isinstance(bare_sys.meta_path[-1], _compat.DownsampleFinder)


def test_finder_knows_no_other_module():
    finder = _compat.DownsampleFinder()
    assert finder.find_spec("theano.tensor.signal.pool") is None


# What Theano and Lasagne compute through the repairs.


def test_scan_gives_the_running_sum():
    import theano
    import theano.tensor as T

    x = T.vector()
    sums, updates = theano.scan(lambda x, total: total + x, x, T.zeros(()))
    run = theano.function([x], sums, updates=updates)
    numpy.testing.assert_array_equal(run([1, 2, 4]), [1, 3, 7])


@pytest.mark.parametrize(
    ("options", "pooled"),
    [
        ({"pool_size": 2}, [[5, 7], [13, 15]]),
        ({"pool_size": (1, 4)}, [[3], [7], [11], [15]]),
        ({"pool_size": 2, "stride": (2, 1)}, [[5, 6, 7], [13, 14, 15]]),
        (
            {"pool_size": 2, "pad": 1},
            [[0, 2, 3], [8, 10, 11], [12, 14, 15]],
        ),
        ({"pool_size": 3}, [[10]]),
        ({"pool_size": 3, "ignore_border": False}, [[10, 11], [14, 15]]),
        (
            {"pool_size": 2, "mode": "average_exc_pad"},
            [[2.5, 4.5], [10.5, 12.5]],
        ),
        (
            {"pool_size": 2, "pad": 1, "mode": "average_inc_pad"},
            [[0, 0.75, 0.75], [3, 7.5, 4.5], [3, 6.75, 3.75]],
        ),
    ],
)
def test_lasagne_pools_the_digits_0_to_15(options, pooled):
    import theano
    from lasagne.layers import InputLayer, MaxPool2DLayer, Pool2DLayer

    layer = Pool2DLayer if "mode" in options else MaxPool2DLayer
    images = theano.tensor.tensor4()
    pool = layer(InputLayer((1, 1, 4, 4), images), **options)
    run = theano.function([images], pool.get_output_for(images))

    digits = numpy.arange(16, dtype=images.dtype).reshape(1, 1, 4, 4)
    numpy.testing.assert_array_equal(run(digits), [[pooled]])


def test_lasagne_pools_in_one_dimension():
    import theano
    from lasagne.layers import InputLayer, MaxPool1DLayer

    rows = theano.tensor.tensor3()
    pool = MaxPool1DLayer(InputLayer((1, 1, 6), rows), 3)
    run = theano.function([rows], pool.get_output_for(rows))

    row = numpy.array([[[1, 3, 2, 4, 6, 5]]], dtype=rows.dtype)
    numpy.testing.assert_array_equal(run(row), [[[3, 6]]])


def test_downsample_defaults_are_those_of_theano_0_7():
    import theano

    downsample = importlib.import_module(DOWNSAMPLE)
    images = theano.tensor.tensor4()
    run = theano.function([images], downsample.max_pool_2d(images, (3, 3)))

    digits = numpy.arange(16, dtype=images.dtype).reshape(1, 1, 4, 4)
    numpy.testing.assert_array_equal(run(digits), [[[[10, 11], [14, 15]]]])
