# make setup | verify | test | matrix | h100 | engines | bench | faults | lint.  Needs Python 3.11 and a C++17 compiler (g++ or
# clang++, or set CXX). make setup DEVICE=cuda installs vLLM's official CUDA wheels instead, on Python 3.11 or 3.12
# (PYTHON=python3.12).
PYTHON ?= python3.11
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(DEVICE)
OTHER := $(filter-out $(STAMP),$(wildcard $(VENV)/.installed-*))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Where PyPI's torch would bring CUDA, point pip at a CPU build: make setup TORCH_OPTIONS="--index-url URL".
TORCH_OPTIONS ?=
REQUIREMENTS_cpu := $(addprefix requirements/,cpu.txt ray-jobs.txt dev.txt build-cpu.txt)
REQUIREMENTS_cuda := $(addprefix requirements/,cuda.txt dev.txt)
REQUIREMENTS := $(or $(REQUIREMENTS_$(DEVICE)),$(error DEVICE=$(DEVICE): allowed is cpu or cuda))

.PHONY: setup verify test matrix h100 engines bench faults mutants lint clean

setup: $(STAMP)

# The order matters on a CPU: vLLM's build imports torch, and torch must come first from its own CPU build.
$(STAMP): $(REQUIREMENTS) pyproject.toml
	$(if $(OTHER),$(error $(VENV) holds the packages of $(OTHER:$(VENV)/.installed-%=%): make clean first))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps $(addprefix -r ,$(REQUIREMENTS))
ifeq ($(DEVICE),cpu)
	$(PIP) $(TORCH_OPTIONS) torch==2.13.0
	VLLM_VERSION_OVERRIDE=0.26.0 VLLM_TARGET_DEVICE=empty \
		$(PIP) --no-deps --no-build-isolation --no-binary vllm vllm==0.26.0
endif
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m rlk.kernels.build
	touch $@

verify: setup
	$(BIN)/rlk verify

test: setup
	$(BIN)/python -m pytest

# Every pair of topologies under every sampling setting, an hour on two cores. It goes on where it was stopped, and writes
# docs/evidence/matrix-cpu.json and docs/matrix.md. A part of it: make matrix MATRIX="--only mixed --minutes 20".
MATRIX ?=
matrix: setup
	$(BIN)/python -m tools.matrix $(MATRIX)

# The same on eight Hopper GPUs, with native arms: writes docs/evidence/h100-matrix.json and docs/h100.md and goes on where the last
# sitting ended. A part of it, or a rehearsal on fewer: make h100 H100="--minutes 8", or H100="--profile hopper-small --only mixed
# --output build/rehearsal.json --page ''".
h100: setup
	$(BIN)/python -m tools.matrix --cells matrices/h100.yaml --native --runs runs/h100 \
		--output docs/evidence/h100-matrix.json --page docs/h100.md $(H100)

# Applies every fault on purpose and writes what caught it to docs/faults.md.
faults: setup
	$(BIN)/python -m pytest --write-faults tests/unit/test_faults.py tests/consistency/test_faults.py

# Runs every line of matrices/engine.yaml and writes docs/evidence/engine-cpu.json: minutes.
engines: setup
	$(BIN)/python -m pytest -m "full or not full" --write-engines tests/consistency/test_engine_matrix.py

# Mutates the validator and writes docs/mutants.md; not in CI. Stopped and started again it goes on; one module with ONLY=checks/oracle.
ONLY ?=
mutants: setup
	test -x build/mutants-venv/bin/python || $(PYTHON) -m venv build/mutants-venv
	build/mutants-venv/bin/python -m pip install --quiet -r requirements/mutants.txt
	PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		build/mutants-venv/bin/python tools/mutants.py $(ONLY)

# On a Hopper GPU: every op beside the ordinary one, sums and gathers beside NCCL's, a decode step and a train step beside native
# mode and vLLM's own model. Times, errors and memory.
bench: setup
	$(BIN)/python -m tests.bench ops --out docs/evidence/bench.json
	$(BIN)/python -m tests.bench collectives --out docs/evidence/bench-collectives.json
	$(BIN)/python -m tests.bench steps --out docs/evidence/bench-steps.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build runs $(VENV)
