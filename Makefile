# make demo    set up and see it work
# make test    set up and check everything (what CI runs)
# make long    the checks that take minutes
# make bench   the benchmarks, into benchmarks/results/
# make evaluate TRACES=folder   the comparison under a burst, into docs/evaluation.md; evaluate-full takes hours

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MACHINE ?= cpu-2core
TRACES ?= traces
SHAPE ?= 100m
DEVICE ?= cpu
SOURCES := $(shell find elastic -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test long bench evaluate evaluate-full clean

demo: $(VENV)/installed
	$(BIN)/elastic demo

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2

long: $(VENV)/installed
	$(BIN)/pytest -q -m long

bench: $(VENV)/installed
	$(BIN)/python benchmarks/run_all.py --machine $(MACHINE)

evaluate: $(VENV)/installed
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)

evaluate-full: $(VENV)/installed
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)-full --full
	$(BIN)/python benchmarks/random_model.py --shape $(SHAPE) --out build/models/$(SHAPE)
	$(BIN)/python benchmarks/evaluate.py --traces $(TRACES) --machine $(MACHINE)-$(SHAPE) --full \
		--model build/models/$(SHAPE) --device $(DEVICE)

$(VENV)/dependencies: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt ".[dev]"
	touch $@

$(VENV)/installed: $(VENV)/dependencies $(SOURCES)
	rm -rf build
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
