# Every target sets up what it needs. A fresh machine has python3 (>= 3.11), make and git.

PYTHON ?= python3
CONFIG ?= configs/reverse-digits.toml
ARGS ?=
PIP_ARGS ?=
WORKERS ?= 2
VENV := .venv
INSTALLED := $(VENV)/.installed
TEST_PACKAGES := postgresql radosgw ceph-mon ceph-osd

export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help install run test lint render bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with the locked dependencies

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: Python 3.11 or newer is needed; name one with PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/apt-install python3-venv
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.lock $(PIP_ARGS)
	$(VENV)/bin/pip install --quiet --no-deps -e .
	@touch $@

run: $(INSTALLED) ## run a campaign here: make run CONFIG=sort-digits ARGS="--set seed=1"
	@$(VENV)/bin/moerl run $(CONFIG) $(ARGS)

test: $(INSTALLED) ## run all tests, against a real PostgreSQL and a real S3 server
	@.ci/apt-install $(TEST_PACKAGES) || echo "make: going on without them" >&2
	@$(VENV)/bin/pytest -n $(WORKERS) $(ARGS)

lint: $(INSTALLED) ## style, types, import rules, templates equal to the code and free of known traps
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/moerl render --check
	$(VENV)/bin/moerl lint templates --profile cpu
	$(VENV)/bin/moerl lint templates/overlays/laptop --profile cpu
	$(VENV)/bin/moerl lint templates/overlays/eks-p5en templates/overlays/eks-p5en/nodes --profile p5en

render: $(INSTALLED) ## write templates/*.yaml and the tables of docs/configuration.md from the code
	@$(VENV)/bin/moerl render
	@$(VENV)/bin/python docs/generate_configuration.py

bench: $(INSTALLED) ## run the benchmarks that benchmarks/README.md describes
	@set -e; for file in benchmarks/[a-z]*.py; do $(VENV)/bin/python -m benchmarks.$$(basename $$file .py); done

clean: ## remove .venv, caches and build files; runs/ stays
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
