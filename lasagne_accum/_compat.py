"""
Let Theano import beside NumPy 1.22 and later, and Lasagne on it.

That is Theano 1.0.5 or Theano-PyMC 1.1.2, and Lasagne 0.1 or 0.2.dev1.
Importing this module is enough, as long as it comes before the first
``import theano``. It fills in what is missing and replaces nothing.

- :func:`restore_blas_info`: the attribute on which ``import theano`` dies
- :func:`watch_imports`: the module and, in Theano-PyMC, the names on which
  ``import lasagne`` dies, supplied when they are asked for
- :func:`skip_scan_extension`: the C helper on which ``theano.scan`` dies
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings


def repair():
    """Make each repair whose cause is there."""
    if "theano" not in sys.modules and not importlib.util.find_spec("theano"):
        return

    restore_blas_info()
    watch_imports()
    if sys.version_info >= (3, 11):
        skip_scan_extension()


def restore_blas_info():
    """Put back ``blas_opt_info``, which NumPy 1.22 dropped."""
    with warnings.catch_warnings():
        # NumPy 1.23 deprecates `numpy.distutils`; Theano can't do without.
        warnings.simplefilter("ignore")
        try:
            config = importlib.import_module("numpy.distutils.__config__")
        except ImportError:
            return

    # Empty, so that Theano makes its own search for a BLAS to link. What
    # the user has set as `blas.ldflags` it takes without looking here.
    config.__dict__.setdefault("blas_opt_info", {})


def watch_imports():
    """Supply what Lasagne needs of Theano as soon as Lasagne needs it."""
    if not any(type(f).__module__ == __name__ for f in sys.meta_path):
        # The first entry is asked for everything, before it is imported,
        # the last one only for what no other finds.
        sys.meta_path.insert(0, LasagneWatcher())
        sys.meta_path.append(DownsampleFinder())


def skip_scan_extension():
    """Let ``theano.scan`` loop in Python: its C code needs Python < 3.11."""
    sys.modules.setdefault("theano.scan_module.scan_perform_ext", None)
    # Where Theano-PyMC has it.
    sys.modules.setdefault("theano.scan.scan_perform_ext", None)


class LasagneWatcher:
    """Import hook that finds nothing, but sees Lasagne come."""

    def find_spec(self, fullname, path=None, target=None):
        """Restore the names ahead of the first module that needs them."""
        # By now Lasagne itself has imported Theano, or said that it can't.
        if fullname == "lasagne.layers":
            restore_names()


def restore_names():
    """Give what Theano-PyMC has renamed its old name too."""
    rng_mrg = importlib.import_module("theano.sandbox.rng_mrg")
    if not hasattr(rng_mrg, "MRG_RandomStream"):
        return

    theano = importlib.import_module("theano")
    basic = importlib.import_module("theano.graph.basic")
    gof = types.SimpleNamespace(
        Apply=basic.Apply,
        Constant=basic.Constant,
        Variable=basic.Variable,
        graph=types.SimpleNamespace(inputs=basic.graph_inputs),
    )
    vars(rng_mrg).setdefault("MRG_RandomStreams", rng_mrg.MRG_RandomStream)
    vars(theano).setdefault("Variable", basic.Variable)
    vars(theano).setdefault("gof", gof)


class DownsampleFinder:
    """Import hook for ``downsample``, which Theano 1.0 dropped."""

    def find_spec(self, fullname, path=None, target=None):
        """Return a spec for ``downsample``, None for all other modules."""
        if fullname == "theano.tensor.signal.downsample":
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec):
        """Leave it to the import system to create the module."""

    def exec_module(self, module):
        """Give the module its one function."""
        module.max_pool_2d = max_pool_2d


def max_pool_2d(
    input, ds, ignore_border=False, st=None, padding=(0, 0), mode="max"
):
    """Pool with the signature that Lasagne 0.1 expects."""
    from theano.tensor.signal.pool import pool_2d

    return pool_2d(
        input,
        ws=ds,
        ignore_border=ignore_border,
        stride=st,
        pad=padding,
        mode=mode,
    )


repair()
