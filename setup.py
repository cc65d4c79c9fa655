import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "lasagne_accum" / "__init__.py").read_text("utf-8")

setup(
    name="lasagne_accum",
    version=re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE).group(1),
    description="Gradient accumulation for Theano and Lasagne",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    author="the lasagne_accum authors",
    license="MIT",
    keywords="theano lasagne gradient accumulation micro-batch",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.7",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=["lasagne_accum"],
    python_requires=">=3.7",
    install_requires=["numpy"],
    extras_require={
        "lasagne": [
            "theano==1.0.5",  # brings scipy and six
            "lasagne",
            "numpy<1.24",  # Theano needs `np.bool`
            "setuptools<82",  # Lasagne needs `pkg_resources`
        ],
        "pymc": ["pymc>=5.22"],  # brings PyTensor from 2.30 on
        "pymc3": [
            "pymc3==3.11.6",  # brings Theano-PyMC 1.1.2
            "fastprogress<1.1",  # later ones bring a web framework
            "lasagne",
            "setuptools<82",
        ],
        "examples": [
            "matplotlib>=3.5,<4",
            "mlxtend>=0.23.1,<0.24",
            "tqdm>=4.60,<5",
        ],
        "test": ["hypothesis", "pytest>=7", "pytest-cov", "pytest-xdist"],
    },
)
