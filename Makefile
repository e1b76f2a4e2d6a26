# Everything sets itself up in a local .venv: `make train` and `make test` are all a fresh machine
# needs. A second run finds the stamps newer than the sources and starts at once.

PYTHON ?= python3
VENV   := .venv
# The versions that were tested. Another file tries others.
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
BUILD_INPUTS := pyproject.toml setup.py $(CONSTRAINTS) src/paceline/_version.py \
	$(wildcard csrc/*.c csrc/*.h csrc/include/*.h)

# Many tests wait, for a time limit or a process to start: one worker more than cores keeps the cores
# busy. `make test WORKERS=0` runs them in one process, for a debugger. A file's tests stay together:
# some files find what every program on the machine sees, a Ray cluster for example.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PARALLEL := -n $(WORKERS) --dist loadfile

# Tests start hundreds of interpreters, which need not compile the package each time.
unexport PYTHONDONTWRITEBYTECODE

# mpirun comes with the test dependencies.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help train demo test test-hosts test-integrations check lint types fast-test bench figures docs docs-serve native-test gpu-test setup clean

help:
	@echo "make train        train a real model on all cores (options: make train ARGS='--epochs 5')"
	@echo "make demo         kill ranks while a model trains, and compare the bits of every step"
	@echo "make test         the whole test suite (options: make test ARGS='-k sampler')"
	@echo "make test-integrations  the recipes with Lightning, Accelerate, Ray Train and the like"
	@echo "make test-hosts   the tests of groups and steps, spread over several hosts"
	@echo "make check        lint, strict types, fast tests"
	@echo "make bench        all benchmarks, tables on the terminal"
	@echo "make figures      measure again what README and the manual say, on an idle machine"
	@echo "make docs         the documentation as HTML in site/"
	@echo "make docs-serve   the same in a browser, while you write"
	@echo "make native-test  sanitizer builds of the native core"
	@echo "make gpu-test     the device tests on this machine's GPUs instead of simulated ones"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The package itself, editable, with what the example needs. Python compiles a module when it is
# first imported: all of torch would take half a minute before anything is seen.
$(VENV)/.installed: $(BUILD_INPUTS) | $(BIN)/python
	@echo "Installing torch and this package into $(VENV), once: some 200 MB, a minute or two."
	$(PIP) install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[examples]'
	@touch $@

# What tests, lint and type checks need on top. MPICH has a prefix of its own, because it brings
# programs of the same names as Open MPI.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --prefix $(VENV)/mpich mpich
	@touch $@

# The packages of the recipes (Lightning, Accelerate, ...), on top of that.
$(VENV)/.installed-integrations: constraints-integrations.txt $(VENV)/.installed-dev
	$(PIP) install --quiet --constraint constraints.txt --constraint $< --editable '.[integrations]'
	@touch $@

setup: $(VENV)/.installed-dev

train: $(VENV)/.installed
	$(BIN)/python examples/digits.py $(ARGS)

demo: $(VENV)/.installed
	$(BIN)/paceline chaos --spare-last $(ARGS) -- examples/exact.py --epochs 20

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/integrations $(ARGS)

test-integrations: $(VENV)/.installed-integrations
	$(BIN)/python -m pytest $(PARALLEL) tests/integrations $(ARGS)

# What holds on one host holds on several: the same tests, with ranks that believe to be on HOSTS.
# In a group of three that is two ranks and one.
HOSTS ?= 2
test-hosts: $(VENV)/.installed-dev
	PACELINE_TEST_HOSTS=$(HOSTS) $(BIN)/python -m pytest $(PARALLEL) tests/ranks/test_backend_collectives.py \
		tests/ranks/test_backend_in_torch.py tests/ranks/test_ddp_*.py tests/parity/test_ddp_bits.py \
		tests/faults/test_ddp_atomic_step.py tests/faults/test_ddp_diverging_calls.py $(ARGS)

check: lint types fast-test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

fast-test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) -q -m "not slow" tests/unit $(ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/paceline bench all $(ARGS)

figures: $(VENV)/.installed-dev
	$(BIN)/python -m tools.figures --measure $(ARGS)

docs: $(VENV)/.installed-dev
	$(BIN)/python tools/build_docs.py

docs-serve: docs
	$(BIN)/zensical serve

native-test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) -q tests/native $(ARGS)

gpu-test: $(VENV)/.installed-dev
	PACELINE_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/devices/test_matrix_*.py $(ARGS)

clean:
	rm -rf $(VENV) build site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/paceline/core/*.so src/paceline/core/native_build.json
