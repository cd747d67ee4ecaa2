PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
MACHINE ?= cpu-2core
TRACES ?= traces
SHAPE ?= 100m
DEVICE ?= cpu
GPU ?= cuda:0
PIP := $(BIN)/pip install -q --disable-pip-version-check
SOURCES := $(shell find elastic -type f -not -name '*.pyc' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo lint type quick test long docs bench gpu evaluate evaluate-full clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(VENV)/installed ## set up, and see it work
	$(BIN)/elastic demo

lint: $(VENV)/dependencies ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/dependencies ## mypy, strict
	$(BIN)/mypy

quick: $(VENV)/dependencies ## lint, types, and the fast unit tests, on the working tree: about a minute
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/pytest -q -n 2 --quick tests/unit

test: $(VENV)/installed lint type ## set up, and check everything against the installed package: what CI runs
	$(BIN)/pytest -q -n 2

long: $(VENV)/installed ## the checks that take minutes
	$(BIN)/pytest -q -m long

docs: $(VENV)/installed ## the documentation site, into build/docs
	$(PIP) -c $(CONSTRAINTS) ".[docs]"
	$(BIN)/sphinx-build -q -W -b html docs build/docs

bench: $(VENV)/installed ## the benchmarks, into benchmarks/results/$(MACHINE).json
	$(BIN)/python benchmarks/run_all.py --machine $(MACHINE)

gpu: $(VENV)/installed ## what only a GPU can tell, in ten minutes, into benchmarks/results/$(MACHINE).json
	$(PIP) -c $(CONSTRAINTS) ".[cuda]"
	$(BIN)/python benchmarks/run_all.py --machine $(MACHINE) --device $(GPU) --suite gpu --minutes 10

evaluate: $(VENV)/installed ## the comparison under a burst of TRACES=folder, into docs/evaluation.md
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)

evaluate-full: $(VENV)/installed ## the same with all traces and a larger model: hours
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)-full --full
	$(BIN)/python benchmarks/random_model.py --shape $(SHAPE) --out build/models/$(SHAPE)
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)-$(SHAPE) --full \
		--model build/models/$(SHAPE) --device $(DEVICE)

$(VENV)/dependencies: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c $(CONSTRAINTS) ".[dev]"
	touch $@

$(VENV)/installed: $(VENV)/dependencies $(SOURCES)
	rm -rf build/lib build/bdist*
	$(PIP) --no-deps --force-reinstall .
	touch $@

clean: ## remove what these made
	rm -rf $(VENV) build *.egg-info
