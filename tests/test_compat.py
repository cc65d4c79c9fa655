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
ITS_NEW_PLACE = "theano.scan.scan_perform_ext"
BOTH = ["LasagneWatcher", "DownsampleFinder"]
# Of both packages, what has to do with the other, as files.
THEANO_PYMC = {
    "theano/__init__.py": "",
    "theano/graph/__init__.py": "",
    "theano/graph/basic.py": (
        "Apply = Constant = None\n"
        "Variable, graph_inputs = 'variable', 'inputs'"
    ),
    "theano/sandbox/__init__.py": "",
    "theano/sandbox/rng_mrg.py": "MRG_RandomStream = 'streams'",
    "lasagne/__init__.py": "import theano\nfrom . import layers",
    "lasagne/layers.py": (
        "import theano\n"
        "from theano.sandbox.rng_mrg import MRG_RandomStreams\n"
        "names = [MRG_RandomStreams, theano.Variable, theano.gof.Variable,\n"
        "         theano.gof.graph.inputs]"
    ),
}
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
def theano():
    """Give Theano or Theano-PyMC to a test that needs one."""
    return pytest.importorskip("theano")


@pytest.fixture
def ldflags(theano):
    """Name the option that tells Theano what BLAS to link."""
    is_pymc = hasattr(theano.config, "blas__ldflags")
    return "blas__ldflags" if is_pymc else "blas.ldflags"


@pytest.fixture
def bare_sys(monkeypatch):
    """Show `_compat` an interpreter with Theano that has imported nothing."""
    bare = types.SimpleNamespace(
        modules={}, meta_path=[], version_info=(3, 10)
    )
    monkeypatch.setattr(importlib.util, "find_spec", "theano".__eq__)
    monkeypatch.setattr(_compat, "sys", bare)
    return bare


@pytest.fixture
def blas_config(monkeypatch):
    """Return NumPy's build configuration without `blas_opt_info`."""
    config = pytest.importorskip("numpy.distutils.__config__")
    monkeypatch.delattr(config, "blas_opt_info", raising=False)
    return config


@pytest.fixture
def theano_pymc(monkeypatch):
    """Put modules with the names of Theano-PyMC in the place of Theano's."""
    modules = {
        "theano": types.SimpleNamespace(),
        "theano.sandbox.rng_mrg": types.SimpleNamespace(
            MRG_RandomStream="streams"
        ),
        "theano.graph.basic": types.SimpleNamespace(
            Apply="apply",
            Constant="constant",
            Variable="variable",
            graph_inputs="inputs",
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def finders(meta_path):
    """List the names of this package's import hooks."""
    return [
        type(finder).__name__
        for finder in meta_path
        if type(finder).__module__ == _compat.__name__
    ]


# In a process of its own: order of imports, and the environment.


def test_theano_and_lasagne_import_after_lasagne_accum(theano):
    code = "import lasagne_accum, theano, lasagne; print(lasagne.__version__)"
    assert python("-c", code)[0].startswith("0.")


def test_lasagne_imports_where_theano_came_first(ldflags):
    code = "import theano, lasagne_accum, lasagne; print(lasagne.__version__)"
    out, _ = python("-c", code, THEANO_FLAGS=f"{ldflags}=")
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


@pytest.mark.parametrize(
    "first", ["lasagne_accum, theano", "theano, lasagne_accum"]
)
def test_lasagne_finds_old_names_in_theano_pymc(tmp_path, first):
    for name, text in THEANO_PYMC.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"import {first}, lasagne; print(lasagne.layers.names)"
    out, _ = python("-c", code, PYTHONPATH=tmp_path)
    assert out == "['streams', 'variable', 'variable', 'inputs']"


@pytest.mark.parametrize("where", ["THEANO_FLAGS", "THEANORC"])
def test_users_own_ldflags_stay(tmp_path, ldflags, where):
    rc = tmp_path / "theanorc"
    rc.write_text("[blas]\nldflags = -lm\n")
    value = {"THEANO_FLAGS": f"{ldflags}=-lm", "THEANORC": rc}[where]
    code = f"import lasagne_accum, theano; print(theano.config.{ldflags})"
    assert python("-c", code, **{where: value})[0] == "-lm"


@pytest.mark.skipif(
    tuple(map(int, numpy.__version__.split(".")[:2])) < (1, 22),
    reason="this NumPy tells Theano what it was linked to itself",
)
def test_theano_links_a_blas_where_there_is_one(tmp_path, ldflags):
    (tmp_path / "libopenblas.so").touch()
    (tmp_path / "blas.cc").write_text(DDOT)
    build = ["g++", "-shared", "-fPIC", "blas.cc", "-o", "libblas.so"]
    subprocess.run(build, cwd=str(tmp_path), check=True)
    code = f"import lasagne_accum, theano; print(theano.config.{ldflags})"
    out, _ = python(
        "-c", code, LIBRARY_PATH=tmp_path, LD_LIBRARY_PATH=tmp_path
    )
    assert out == "-lblas"


def test_theano_links_no_blas_where_there_is_none(tmp_path, ldflags):
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
    code = f"import lasagne_accum, theano; print(theano.config.{ldflags})"
    out, _ = python("-c", code)
    assert bool(out) is (links.returncode == 0)


# In this process: each repair by itself.


def test_repair_is_idempotent(bare_sys):
    _compat.repair()
    _compat.repair()
    assert finders(bare_sys.meta_path) == BOTH


def test_reloading_adds_no_second_finder(theano):
    importlib.reload(_compat)
    assert finders(sys.meta_path) == BOTH


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
    assert finders(bare_sys.meta_path) == BOTH


@pytest.mark.parametrize(
    ("version", "modules"),
    [
        ((3, 7), {}),
        ((3, 10), {}),
        ((3, 11), {SCAN_EXTENSION: None, ITS_NEW_PLACE: None}),
    ],
)
def test_scan_extension_is_skipped_from_python_311_on(
    bare_sys, version, modules
):
    bare_sys.version_info = version
    _compat.repair()
    assert bare_sys.modules == modules


@pytest.mark.parametrize("name", [SCAN_EXTENSION, ITS_NEW_PLACE])
def test_scan_extension_that_works_stays(bare_sys, name):
    bare_sys.modules[name] = extension = object()
    _compat.skip_scan_extension()
    assert bare_sys.modules[name] is extension


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


def test_watcher_comes_first_and_finder_last(bare_sys):
    bare_sys.meta_path.append(object())
    _compat.watch_imports()
    assert isinstance(bare_sys.meta_path[0], _compat.LasagneWatcher)
    assert isinstance(bare_sys.meta_path[-1], _compat.DownsampleFinder)


def test_finder_knows_no_other_module():
    finder = _compat.DownsampleFinder()
    assert finder.find_spec("theano.tensor.signal.pool") is None


def test_watcher_restores_names_when_lasagne_imports_layers(theano_pymc):
    watcher = _compat.LasagneWatcher()
    assert watcher.find_spec("lasagne") is None
    assert vars(theano_pymc["theano"]) == {}
    assert watcher.find_spec("lasagne.layers") is None
    assert theano_pymc["theano"].Variable == "variable"


def test_theano_pymc_gets_the_old_names(theano_pymc):
    _compat.restore_names()
    theano, rng_mrg, _ = theano_pymc.values()
    assert rng_mrg.MRG_RandomStreams == "streams"
    assert theano.Variable == theano.gof.Variable == "variable"
    assert theano.gof.Constant == "constant"
    assert theano.gof.Apply == "apply"
    assert theano.gof.graph.inputs == "inputs"


def test_old_names_that_are_there_stay(theano_pymc):
    theano, rng_mrg, _ = theano_pymc.values()
    theano.Variable = theano.gof = rng_mrg.MRG_RandomStreams = "own"
    _compat.restore_names()
    assert theano.Variable == theano.gof == rng_mrg.MRG_RandomStreams == "own"


def test_theano_1_0_gets_no_name(theano_pymc):
    theano, rng_mrg, _ = theano_pymc.values()
    del rng_mrg.MRG_RandomStream
    _compat.restore_names()
    assert (vars(theano), vars(rng_mrg)) == ({}, {})


# What Theano and Lasagne compute through the repairs.


def test_scan_gives_the_running_sum(theano):
    T = theano.tensor
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
def test_lasagne_pools_the_digits_0_to_15(theano, options, pooled):
    from lasagne.layers import InputLayer, MaxPool2DLayer, Pool2DLayer

    layer = Pool2DLayer if "mode" in options else MaxPool2DLayer
    images = theano.tensor.tensor4()
    pool = layer(InputLayer((1, 1, 4, 4), images), **options)
    run = theano.function([images], pool.get_output_for(images))

    digits = numpy.arange(16, dtype=images.dtype).reshape(1, 1, 4, 4)
    numpy.testing.assert_array_equal(run(digits), [[pooled]])


def test_lasagne_drops_values_out(theano, fast_compile):
    from lasagne.layers import DropoutLayer, InputLayer

    ones = theano.tensor.ones((100, 100))
    dropped = DropoutLayer(InputLayer((100, 100)), 0.25).get_output_for(ones)
    values = theano.function([], dropped)()
    kept = numpy.asarray(1 / 0.75, values.dtype)
    numpy.testing.assert_allclose(values[values != 0], kept)
    assert 0.7 < numpy.mean(values != 0) < 0.8


def test_lasagne_takes_a_variable_as_it_is(theano):
    import lasagne.utils

    x = theano.tensor.vector()
    assert lasagne.utils.as_theano_expression(x) is x


def test_inputs_of_a_graph_have_their_old_name(theano):
    import lasagne  # noqa: F401 - names are restored on its behalf

    x, y = theano.tensor.vectors("xy")
    assert list(theano.gof.graph.inputs([x * y])) == [x, y]


def test_lasagne_pools_in_one_dimension(theano):
    from lasagne.layers import InputLayer, MaxPool1DLayer

    rows = theano.tensor.tensor3()
    pool = MaxPool1DLayer(InputLayer((1, 1, 6), rows), 3)
    run = theano.function([rows], pool.get_output_for(rows))

    row = numpy.array([[[1, 3, 2, 4, 6, 5]]], dtype=rows.dtype)
    numpy.testing.assert_array_equal(run(row), [[[3, 6]]])


def test_downsample_defaults_are_those_of_theano_0_7(theano):
    downsample = importlib.import_module(DOWNSAMPLE)
    images = theano.tensor.tensor4()
    run = theano.function([images], downsample.max_pool_2d(images, (3, 3)))

    digits = numpy.arange(16, dtype=images.dtype).reshape(1, 1, 4, 4)
    numpy.testing.assert_array_equal(run(digits), [[[[10, 11], [14, 15]]]])
