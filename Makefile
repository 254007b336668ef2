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

.PHONY: help install demo test lint types tests bench clean

help:
	@echo "make demo    set up, write a small four-modality dataset, train on it, evaluate (about 5 minutes)"
	echo "make test    set up, lint, type checks, all tests"
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

bench: install
	@for script in benchmarks/bench_*.py; do
	  echo "== $$script"
	  PYTHONPATH=benchmarks $(BIN)/python "$$script" || exit 1
	done

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(DEMO_DIR) ./*.egg-info src/*.egg-info
