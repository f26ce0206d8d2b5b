# make demo    set up whatever is missing, then show a session being snapshotted, broken, restored and forked
# make test    set up, lint, and run every test (as root, on the real kernel)
# make setup   only the set-up; a second run finds everything there and ends at once

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup setup-tests test lint demo bench clean

BIN := .venv/bin
# real kernels, daemons and a shared machine: what fails is tried once more, and the summary counts it as rerun
PYTEST := $(BIN)/pytest tests --reruns 1 --reruns-delay 1 -r fER

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

setup: .venv/.made
	@$(BIN)/waypoint setup --system-packages
	@$(BIN)/python -m compileall -q src	# also where PYTHONDONTWRITEBYTECODE is set: `waypoint exec` is mostly its imports

# What only the other backends and the tests need: some hundred megabytes of Debian packages, the first time.
setup-tests: setup
	@$(BIN)/waypoint setup --all-packages
	@$(BIN)/statefork setup
	@for n in 1 2 3; do env -u STATEFORK_HOME $(BIN)/statefork experiment setup && break || [ $$n != 3 ]; done	# the tasks' base and images, cached
	@scripts/sdk.sh true	# Node.js and the packages that the tests of the TypeScript SDK need
	@scripts/frameworks.sh	# the agent frameworks of tests/integrations, in .frameworks

# The virtualenv follows the list of dependencies: it is made again when that changes, and at no other time.
.venv/.made: pyproject.toml scripts/bootstrap.sh
	@scripts/bootstrap.sh
	@touch $@

lint: .venv/.made
	$(BIN)/ruff check .
	$(BIN)/mypy
	@if grep -q '^\[tool.importlinter\]' pyproject.toml || [ -f .importlinter ]; then $(BIN)/lint-imports; fi

# Two files of tests at a time; then those that look at the whole host, with nothing beside them.
test: setup-tests lint
	$(PYTEST) -n 2 --dist loadfile -m 'not alone'
	$(PYTEST) -m alone

demo: setup
	@$(BIN)/waypoint demo

bench: setup
	@$(BIN)/waypoint bench

# What setup made in this directory. `docs/install.md` says what it made elsewhere.
clean:
	rm -rf sdk/typescript/node_modules sdk/typescript/dist
	rm -rf build dist .venv .frameworks .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
