# Every target first brings up the same .venv; with nothing changed that takes well under a second.
#
#   PYTHON=python3.12       the Python to build .venv on (its PyTorch is used when it sees the GPU)
#   WEFT_PYTHON=…           an existing environment to build .venv on
#   WEFT_TORCH_INDEX=…      where PyTorch comes from
#   SKIP_SETUP=1            no .venv: run PYTHON itself on src/ (a machine without a network that has all it needs)
#   PYTEST_ARGS='-k softmax'   REPORT_ARGS='…'   SANITIZE=memcheck|racecheck
#   WEFT_RESULTS=…          where records go
#   WEFT_COMMIT=…           the commit that records name where there is no .git

PYTHON ?= python3
PYTEST_ARGS ?=
REPORT_ARGS ?=
SANITIZE ?=
SHELL := /bin/bash
unexport PYTHONDONTWRITEBYTECODE # set in container images; each of the tests' processes would compile all of weft anew

ifdef SKIP_SETUP
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
RUN := $(PYTHON)
BRING_UP :=
else
RUN := .venv/bin/python
BRING_UP := setup
endif

# The caching allocator would hide accesses past the end of a tensor from the sanitizer.
ifneq ($(SANITIZE),)
BRING_UP += sanitizer
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(SANITIZE) --report-api-errors no --target-processes all --error-exitcode 1
endif

.PHONY: help setup sanitizer report test test-all gpu-test lint clean
.DEFAULT_GOAL := help

help: ## these targets, and the variables
	@sed -n -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20
	@sed -n 's/^#   /  /p' Makefile

setup: ## .venv with weft and the PyTorch that fits this machine
	@$(PYTHON) scripts/setup.py

report: $(BRING_UP) ## measure what this machine can, and render the report
	$(RUN) -m weft report $(REPORT_ARGS)

test: $(BRING_UP) ## the tests that this machine can run, without the long property runs
	$(RUN) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-all: export WEFT_LONG := all
test-all: test ## those and the long property runs

gpu-test: $(BRING_UP) ## the tests that need a GPU; SANITIZE=memcheck or racecheck runs them under compute-sanitizer
	$(SANITIZER) $(RUN) -m pytest -m gpu $(PYTEST_ARGS)

sanitizer:
	@command -v compute-sanitizer > /dev/null || { echo 'compute-sanitizer is not on PATH:' \
	'export PATH=/usr/local/cuda/bin:$$PATH, or sudo apt-get install cuda-sanitizer-13-0' >&2; exit 1; }

lint: $(BRING_UP) ## style, types, layers, shell scripts, generated files
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo --no-cache
	@if command -v shellcheck > /dev/null; then set -x; shellcheck scripts/*.sh .ci/run; \
	else echo 'shellcheck is not installed, shell scripts not checked: sudo apt-get install shellcheck'; fi
	$(RUN) -m weft tables --check
	$(RUN) -m weft stubs --check

clean: ## remove .venv, caches and built pages; measured records in results/ stay
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist report
	find src tests scripts examples \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
