"""
Let Theano 1.0.5 import beside NumPy 1.22 and later, and Lasagne 0.1 on it.

Importing this module is enough, as long as it comes before the first
``import theano``. It fills in what is missing and replaces nothing.

- :func:`restore_blas_info`: the attribute on which ``import theano`` dies
- :func:`offer_downsample`: the module on which ``import lasagne`` dies
- :func:`skip_scan_extension`: the C helper on which ``theano.scan`` dies
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings


def repair():
    """Make each repair whose cause is there."""
    if "theano" not in sys.modules and not importlib.util.find_spec("theano"):
        return

    restore_blas_info()
    offer_downsample()
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


def offer_downsample():
    """Supply ``theano.tensor.signal.downsample`` if Theano doesn't."""
    if not any(type(f).__module__ == __name__ for f in sys.meta_path):
        # The last entry is only asked for what no other one finds.
        sys.meta_path.append(DownsampleFinder())


def skip_scan_extension():
    """Let ``theano.scan`` loop in Python: its C code needs Python < 3.11."""
    sys.modules.setdefault("theano.scan_module.scan_perform_ext", None)


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
