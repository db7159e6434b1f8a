# Everything a developer and CI do here, one target each. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.headrace-installed
# The oldest RQ that is promised, in a folder of its own: its tools are judges in the tests too.
RQ2 := $(VENV)/rq2
# It installs in seconds what takes pip minutes. It does not read pip's settings: where an index of
# one's own stands only there, pip does it.
UV ?= $(VENV)/bin/uv
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# Passed on to pytest, as in `make test ARGS="-n 2 tests/unit"`.
ARGS ?=
# Processes that run tests side by side: most of them wait for servers, so more than cores.
TESTERS ?= 5
# The folder of recorded faults, beside the checkout. Tests that need it say so where it is missing.
CASES ?= ../shared/cases
export CASES
# Tests start thousands of processes of ours: each would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

# Only what is there: a checkout may come before its benchmarks do, and mypy refuses a missing one.
TYPED := $(wildcard producer workers common tests bench)
SHELL_FILES = $(shell find .ci deploy tests bench -type f \( -path .ci/run -o -name '*.sh' -o -name '*.sbatch' -o -name headrace-do \) 2>/dev/null)

.DEFAULT_GOAL := help
# `check` runs the cheap ones first, also under -j; and pytest's summary must come last.
.NOTPARALLEL:
.PHONY: help install demo format lint types imports test faults chaos soak cases real wheels bench check lock clean mutants

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with the pinned packages and this project (once, and when pins change)

$(STAMP): requirements.txt requirements-rq2.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Headrace needs Python 3.11 or newer, and '$(PYTHON)' is none. Where it has another name: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make a virtual environment: its venv or ensurepip is missing. On Debian and Ubuntu: apt-get install python3-venv. Then run make again." >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned packages into $(VENV), once"
	@sed -n '/^uv==/,/# via/p' requirements.txt >$(VENV)/requirements-uv.txt
	@$(PIP) --require-hashes --no-deps -r $(VENV)/requirements-uv.txt
	@rm -rf $(RQ2)
	@add() { $(UV) pip install --quiet --python $(PY) "$$@" || { \
	  echo "uv could not install (above): pip does, which takes minutes" >&2; $(PIP) "$$@"; }; } && \
	add --require-hashes -r requirements.txt && \
	add --require-hashes --no-deps --target $(RQ2) -r requirements-rq2.txt && \
	add --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## A whole run on this machine: simulated servers, Redis, sink, verify
	$(PY) deploy/demo/run.py

format: install ## Rewrite the code as the formatter wants it, and fix what ruff can fix
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lint: install ## The formatter's and ruff's rules, and shellcheck's
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/shellcheck $(SHELL_FILES)

types: install ## mypy, strict, tests included
	$(VENV)/bin/mypy --num-workers auto $(TYPED)

imports: install ## The import contracts: one way, and pure modules stay pure
	$(VENV)/bin/lint-imports --no-logo

test: install ## All tests but the soak and the real server (TESTERS=0: one after another)
	$(PY) -m pytest -n $(TESTERS) --dist worksteal $(ARGS)

faults: install ## Only the faults: killed processes, lost answers, servers that lie
	$(PY) -m pytest tests/faults $(ARGS)

chaos: install ## Processes killed at random for 10 minutes (ARGS="--seed S --minutes M --kills N --redis always --store s3")
	$(PY) -m tests.chaos $(ARGS)

soak: install ## Random walks over all of Redis and store for 10 minutes (ARGS="--minutes M --seed S --kind K --once --shrink")
	$(PY) -m tests.machine.play $(ARGS)

cases: install ## Only the faults that people met (CASES=folder)
	$(PY) -m pytest -m cases $(ARGS)

mutants: install ## Take away each guard of the protocol in turn: its test must fail (ARGS="--only NAME")
	$(PY) -m tests.mutants $(ARGS)

real: install ## Against a real SGLang server on this machine's CPU
	bash tests/real/run.sh

wheels: install ## Compare the record of SGLang's flags with the wheels (ARGS=--write: write it anew)
	$(PY) -m tests.sglang_flags $(ARGS)

bench: install ## The benchmarks, beside their peers
	$(PY) -m bench

check: lint types imports test ## What CI runs, cheap first

lock: install ## Resolve the pins anew from pyproject.toml (LOCK="--upgrade" raises them)
	$(UV) pip compile $(LOCK_OPTIONS) --group demo --group test --group lint -o requirements.txt
	$(UV) pip compile $(LOCK_OPTIONS) --constraint requirements.txt -o requirements-runtime.txt
	echo 'rq==2.12.0' | $(UV) pip compile $(LOCK_FLAGS) - -o requirements-rq2.txt

LOCK ?=
# --no-config: a developer's own index settings must not show in the files.
LOCK_FLAGS = --quiet --no-config --universal --python-version 3.11 --generate-hashes \
  --annotation-style line --custom-compile-command "make lock" $(LOCK)
LOCK_OPTIONS = $(LOCK_FLAGS) pyproject.toml --extra embedded --group build

clean: ## Remove caches and build leftovers (not .venv, not runs)
	rm -rf build dist headrace.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
