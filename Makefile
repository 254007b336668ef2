# Two commands do everything on a fresh machine with Python 3.11+, make and a C compiler:
#   make demo   sets up .venv and runs the main job: writes a small dataset, trains on it, evaluates
#   make test   the same set-up, then lint, types and all tests
# VENV=... chooses where the virtual environment lives, PYTHON=... which interpreter makes it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= demo
BIN := $(VENV)/bin
# The root folder holds `kernels`, `model` ...: never let it shadow installed packages.
export PYTHONSAFEPATH := 1
# Idle OpenMP threads sleep: on a busy machine, spinning ones take the cores from everyone else.
export OMP_WAIT_POLICY ?= passive

.PHONY: help install demo test lint types tests kernels gpu netns soak stores fuzz bench learning clean

help:
	@echo "make demo    set up, write a small four-modality dataset, train on it, evaluate (about 5 minutes)"
	echo "make test    set up, lint, type checks, all tests"
	echo "make kernels thorough kernel tests in Triton's interpreter and the full compile report, without a GPU (about 10 minutes)"
	echo "make gpu     on a machine with a GPU: kernels, graph and step checked on it, then measured, into gpu_report/ (8 minutes)"
	echo "make soak    a minute of eight threads decoding whole and damaged files of every kind, here and in worker processes; 50 kills of a stream, 50 of readers that share a cache, 20 of ranks"
	echo "make netns   two machines as network namespaces: power lost, a slow cable, a cut one (needs root)"
	echo "make stores  gs:// and hf:// against servers of their HTTP APIs; installs their libraries"
	echo "make fuzz    the tar reader against FUZZ_CASES mutated archives; the decoders, guided by coverage, for FUZZ_S seconds (corpus in FUZZ_DIR)"
	echo "make learning  what each objective learns on the stamps in STAMPS: an hour of one core; rewrites benchmarks/learning.md"
	echo "make bench   the benchmarks behind the README's claims; appends to benchmarks/results.csv"
	echo "make clean   remove the virtual environment, caches and the demo's output"

# Dependencies follow pyproject.toml; the editable install follows the clone.
install:
	@start=$$SECONDS
	want=$$(cksum < pyproject.toml)
	if [ "$$(cat $(VENV)/.dependencies 2>/dev/null)" != "$$want" ]; then
	  echo "== set-up: virtual environment in $(VENV), dependencies of pyproject.toml (PyTorch is several GB)"
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Treadle needs Python 3.11 or newer; name one with make PYTHON=...")'
	  $(PYTHON) -m venv $(VENV)
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	  pwd > $(VENV)/.clone
	  echo "$$want" > $(VENV)/.dependencies
	elif [ "$$(cat $(VENV)/.clone 2>/dev/null)" != "$$(pwd)" ]; then
	  echo "== set-up: linking this clone into $(VENV)"
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	  pwd > $(VENV)/.clone
	fi
	echo "== set-up done in $$((SECONDS - start)) s"

demo: install
	@start=$$SECONDS
	echo "== demo: four-modality shards, training, evaluation into $(DEMO_DIR)"
	$(BIN)/treadle demo --out $(DEMO_DIR) --again
	echo "== demo done in $$((SECONDS - start)) s"

lint: install
	@start=$$SECONDS
	echo "== lint: ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	echo "== lint done in $$((SECONDS - start)) s"

types: install
	@start=$$SECONDS
	echo "== types: mypy --strict, pyright strict"
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	echo "== types done in $$((SECONDS - start)) s"

tests: install
	@start=$$SECONDS
	echo "== tests: pytest"
	$(BIN)/python -m pytest -q --durations=15
	echo "== tests done in $$((SECONDS - start)) s"

test: install
	@start=$$SECONDS
	$(MAKE) --no-print-directory lint types
	$(MAKE) --no-print-directory tests
	echo "== all checks passed in $$((SECONDS - start)) s"

# Everything about kernels that needs no GPU: thorough cases in Triton's interpreter, and every kernel built for three architectures.
kernels: install
	@start=$$SECONDS
	echo "== kernels: Triton's interpreter against the references"
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/kernels/triton
	echo "== kernels: compile report"
	$(BIN)/python -m treadle.kernels --check
	echo "== kernels done in $$((SECONDS - start)) s"

# Everything that needs a GPU, in eight minutes on one H200; without one it says so and exits 2. Where PYTHON has a torch that sees the GPU, and
# pytest, that is what runs, with nothing installed: a machine of GPUs need not reach a package index.
gpu:
	@if $(PYTHON) -c 'import sys, pytest, torch, triton, PIL, safetensors; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
	  python=$(PYTHON)
	else
	  $(MAKE) --no-print-directory install
	  python=$(BIN)/python
	fi
	PYTHONPATH=src:benchmarks $$python benchmarks/gpu.py --out gpu_report

# Two machines that are network namespaces, one of which loses power; cables that delay, drop and are cut. Three minutes; needs root.
netns: install
	@TREADLE_NETNS=1 $(BIN)/python -m pytest -q tests/end_to_end/test_network.py

# gs:// and hf:// against small servers of their HTTP APIs; installs their libraries, which are extras.
stores: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[gcs,hf]'
	$(BIN)/python -m pytest -q tests/pipeline/test_other_stores.py

soak: install
	@TREADLE_SOAK_S=60 $(BIN)/python -m pytest -q tests/decoders/test_threads.py
	TREADLE_KILLS=50 $(BIN)/python -m pytest -q tests/pipeline/test_kill.py tests/pipeline/test_cache.py
	TREADLE_KILLS=20 $(BIN)/python -m pytest -q tests/end_to_end/test_kills.py

# FUZZ_CASES mutated tars, some 20 ms each; then FUZZ_S seconds of decoders. Inputs that reach new code stay in FUZZ_DIR, outside the repository.
FUZZ_CASES ?= 20000
FUZZ_S ?= 600
FUZZ_DIR ?= $(HOME)/.cache/treadle-fuzz
fuzz: install
	@start=$$SECONDS
	TREADLE_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest -q tests/pipeline/test_tar_fuzz.py
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	$(BIN)/python tests/decoders/fuzz_decoders.py "$(FUZZ_DIR)/corpus" --seconds $(FUZZ_S)
	echo "== fuzz done in $$((SECONDS - start)) s"

# Where examples/stamps/build.py wrote the stamps.
STAMPS ?= shards
learning: install
	@start=$$SECONDS
	PYTHONPATH=benchmarks nice $(BIN)/python benchmarks/learning.py --shards "$(STAMPS)"
	echo "== learning done in $$((SECONDS - start)) s"

bench: install
	@for script in benchmarks/bench_*.py; do
	  echo "== $$script"
	  PYTHONPATH=benchmarks $(BIN)/python "$$script" || exit 1
	done

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(DEMO_DIR) ./*.egg-info src/*.egg-info
