# What `make mnist` trains, and for how many epochs.
MNIST = cnn 12
PYTHON = .venv/bin/python

mnist: .venv/ready
	$(PYTHON) examples/mnist.py $(MNIST)

test: .venv/ready
	$(PYTHON) -m pytest --cov -n 2 --dist worksteal

mutants: .venv/ready
	$(PYTHON) tests/mutants.py

lint: .venv/ready-to-lint
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m numpydoc lint lasagne_accum/*.py

clean:
	rm -rf .venv .venv.uv build dist *.egg-info .coverage*
	rm -rf .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -exec rm -r {} +

.venv/ready: setup.py .ci/constraints.txt .ci/venv
	sh .ci/venv .venv --editable ".[lasagne,examples,test]"
	touch $@

.venv/ready-to-lint: .venv/ready
	$(PYTHON) -m pip install -c .ci/constraints.txt numpydoc ruff
	touch $@

.PHONY: mnist test mutants lint clean
