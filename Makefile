# One command each; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
WORKERS ?= 2
TEXT ?= bench/data/voyage_of_the_beagle.txt
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
READY := .venv/.ready
BASE := build/base

.PHONY: help setup model test test-browser fuzz check lint smoke format demo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything pinned; seconds when there is nothing to do

# torch comes first and by its exact version: left to a dependency, pip may choose a far larger build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Headwater needs Python 3.11 or newer, and $(PYTHON) is" \
	           "$$($(PYTHON) --version 2>&1 || true); run: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) --upgrade pip
	@$(PIP) torch
	@$(PIP) --editable '.[transformers,llamacpp,mlx,report,lab,memory,server]' --group dev
	@touch $@

model: setup
	@$(BIN)/headwater models path smollm2 >/dev/null 2>&1 || $(BIN)/headwater models fetch smollm2

# COVERAGE=1 measures coverage in the same run; ARGS goes to pytest.
test: model ## run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not browser" $(if $(COVERAGE),--cov --cov-report=term) $(ARGS)

test-browser: setup ## drive the page in a Chromium; skipped, with the reason, where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/server/test_page.py

fuzz: setup ## send the server what nobody would, for MINUTES (10)
	$(BIN)/python -m bench.fuzz --minutes $(or $(MINUTES),10)

lint: setup ## format, lint, types and import floors, without changing a file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# A wheel of its own in an environment of its own: what `pip install headwater` gives, no extra, no checkout.
smoke: setup ## build the wheel, install it without extras, and run it
	@rm -rf $(BASE) && mkdir -p $(BASE)
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir $(BASE) .
	@$(PYTHON) -m venv $(BASE)/venv
	@$(BASE)/venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(BASE)/*.whl
	cd $(BASE) && venv/bin/python -I $(CURDIR)/tests/base_install.py && venv/bin/headwater --version

check: lint smoke ## everything that .ci/run checks
	@$(MAKE) --no-print-directory test COVERAGE=1
	@$(MAKE) --no-print-directory test-browser

format: setup ## format the sources and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: model ## compare the policies on the embedded model over a real conversation
	@$(BIN)/headwater compare --output report
	@echo "Report: $(CURDIR)/report/index.html"

bench: model ## measure the cache, the engines, the replay, and a long text (TEXT=FILE for another)
	$(BIN)/python -m bench.cache
	$(BIN)/python -m bench.int8
	$(BIN)/python -m bench.engines --text $(TEXT)
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.server
	$(BIN)/headwater stream $(TEXT) --tokens 25000 --output docs/results/stream.json

clean: ## remove the environment and everything that was made
	rm -rf .venv build dist report .coverage .pytest_cache .ruff_cache .hypothesis .import_linter_cache
