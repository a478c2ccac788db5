# Everything a fresh machine needs: Python >= 3.11, git and make. The first target builds .venv from the lock.
PYTHON ?= python3
# Extra pip arguments; for example an index of CPU builds of torch, or none.
PIP_ARGS ?=
RECIPE ?= default
ARGS ?=

export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
# Else each of the workers rewrites the assertions of every test file on every run.
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin

.PHONY: train test test-slow test-browser test-explore test-vllm lint bench lab-all docs setup clean
.DEFAULT_GOAL := train

train: setup  ## warm start, RL with KPop on a tiny MoE, report
	$(BIN)/rollkeel train $(RECIPE) $(ARGS)

test: setup .venv/.triton  ## everything but the slow tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not cuda and not vllm" $(ARGS)

test-slow: setup  ## long ones, and further cases of quick ones
	$(BIN)/python -m pytest -m "slow" $(ARGS)

test-browser: setup  ## the board in a real browser: needs Chromium, on the path or named by ROLLKEEL_CHROMIUM
	$(BIN)/python -m pytest -m "browser" -rs $(ARGS)

test-explore: setup .venv/.triton  ## the property tests, on new examples each time
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not slow and not cuda and not vllm" --hypothesis-profile=default $(ARGS)

test-vllm: setup .venv-vllm/.done  ## the engine in a real vLLM server on this machine's CPU: about ten minutes
	$(BIN)/python -m pytest -m "vllm" $(ARGS)

lint: setup .venv/.triton  ## ruff and pyright
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

bench: setup .venv-bench/.done  ## speed and memory against a peer, in one run
	$(BIN)/python -m benchmarks.peer.compare --peer-python .venv-bench/bin/python $(ARGS)

lab-all: setup  ## every experiment of the laboratory over five seeds, and the tables of docs/lab.md: hours
	$(BIN)/python -m benchmarks.lab --out lab $(ARGS)

docs: .venv-docs/.done  ## the site, into site/; a broken link, a broken anchor or a page that asks another host is an error
	.venv-docs/bin/mkdocs build --strict

setup: .venv/.done

# This repository's distributions: each has a pyproject.toml.
DISTRIBUTIONS := . ./rollkeel_sandbox ./rollkeel_doctor

.venv/.done: requirements.lock $(DISTRIBUTIONS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rollkeel needs Python >= 3.11; set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(DISTRIBUTIONS:%=-e %)
	# Kernels are compiled once, not in the first run.
	$(BIN)/python -c "from rollkeel.models import compiled" & \
		$(BIN)/python -c "from rollkeel.models import checksum, delta, packed, parity" && wait $$!
	@touch $@

# The kernels for GPUs run in Triton's interpreter. It comes with a CUDA build of torch, not with one for CPUs.
.venv/.triton: .venv/.done requirements-triton.txt
	@test "$$(uname)" != Linux || $(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements-triton.txt
	@touch $@

.venv-bench/.done: benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r benchmarks/requirements.txt
	@touch $@

# vLLM wants its own versions of torch's companions, and of transformers: an environment of its own.
.venv-vllm/.done: requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements-vllm.txt
	# Its text server needs none of these, and their operators do not load beside this torch.
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-docs/.done: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements-docs.txt
	@touch $@

clean:
	rm -rf .venv .venv-bench .venv-vllm .venv-docs site runs .pytest_cache .ruff_cache .hypothesis
