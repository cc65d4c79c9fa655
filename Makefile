# What `make mnist` trains, and for how many epochs.
MNIST = cnn 12
# Further words for `make test`, such as -k or --no-cov.
PYTEST =
VENV = .venv
PYTHON = $(VENV)/bin/python

mnist: $(VENV)/ready
	$(PYTHON) examples/mnist.py $(MNIST)

test: $(VENV)/ready
	$(PYTHON) -m pytest --cov -n 2 --dist loadfile $(PYTEST)

# All of it with each dtype, on the oldest, the newest and one between.
test-all:
	for python in 3.7 3.9 3.11; do for floatX in float32 float64; do \
	    echo "Python $$python, $$floatX"; \
	    THEANO_FLAGS=floatX=$$floatX $(MAKE) test PYTEST=--no-cov \
	        VERSIONS=$$python VENV=.venv-$$python || exit 1; \
	done; done

# On a GPU, or on the processor as an OpenCL device.
DEVICE = opencl0:0
GPU = .venv-gpu
test-gpu:
	VERSIONS=3.11 $(MAKE) VENV=$(GPU) $(GPU)/ready
	$(GPU)/bin/python -m pip install -c .ci/constraints.txt mako
	sh .ci/pygpu $(GPU)
	THEANO_FLAGS=device=$(DEVICE),floatX=float32 \
	    $(GPU)/bin/python -m pytest -n 2 $(PYTEST) tests/test_gpu.py

# The core on PyTensor with PyMC's rules, and what PyMC makes of it.
CORE = $(patsubst %,tests/test_%.py,backend equivalence accumulation function \
    state stateful modes pymc)
test-pymc: .venv-pymc/ready
	RULES=pymc.variational.updates .venv-pymc/bin/python -m pytest -n 2 \
	    $(PYTEST) $(CORE) tests/test_pymc_advi_example.py \
	    tests/test_benchmarks.py

# The core on Theano-PyMC, with Lasagne's rules and with PyMC3's.
test-pymc3: .venv-pymc3/ready
	for rules in lasagne.updates pymc3.variational.updates; do \
	    THEANO_FLAGS=base_compiledir=~/.theano-pymc RULES=$$rules \
	        .venv-pymc3/bin/python -m pytest -n 2 $(PYTEST) $(CORE) \
	        tests/test_compat.py || exit 1; \
	done

mutants: $(VENV)/ready
	$(PYTHON) tests/mutants.py

lint: $(VENV)/ready-to-lint
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m numpydoc lint lasagne_accum/*.py

clean:
	rm -rf .venv .venv-* .venv.uv build dist *.egg-info .coverage*
	rm -rf .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -exec rm -r {} +

$(VENV)/ready: setup.py .ci/constraints.txt .ci/venv
	sh .ci/venv $(VENV) --editable ".[lasagne,examples,test]"
	touch $@

.venv-pymc/ready: setup.py .ci/pymc.txt .ci/venv
	PINS=pymc.txt VERSIONS="3.13 3.12" sh .ci/venv .venv-pymc pytensor_ml \
	    scikit-learn matplotlib tqdm --editable ".[pymc,test]"
	touch $@

.venv-pymc3/ready: setup.py .ci/pymc3.txt .ci/venv
	PINS=pymc3.txt VERSIONS="3.10 3.9 3.8" sh .ci/venv .venv-pymc3 \
	    --editable ".[pymc3,test]"
	touch $@

$(VENV)/ready-to-lint: $(VENV)/ready
	$(PYTHON) -m pip install -c .ci/constraints.txt numpydoc ruff
	touch $@

.PHONY: mnist test test-all test-pymc test-pymc3 test-gpu mutants lint clean
