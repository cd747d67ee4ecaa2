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
SIMULATED_VENV ?= build/simulated-venv
SIMULATED_CUDA := $(CURDIR)/build/simulated-cuda
SCHEDULES ?= lazy random:1 random:2
TESTS ?= tests
VLLM_VENV ?= build/vllm-venv
VLLM_DRIFT ?= vllm
RAY_VENV ?= build/ray-venv
CLIENTS_VENV ?= build/clients-venv
SIMULATED := LD_LIBRARY_PATH=$(SIMULATED_CUDA) LD_PRELOAD=$(SIMULATED_CUDA)/libcudart.so.13 \
	PYTHONPATH=$(SIMULATED_CUDA):$(CURDIR):$(CURDIR)/tests \
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 SIMCUDA_DEVICES=2
SIMULATED_PYTEST := $(SIMULATED_VENV)/bin/python -m pytest -q -m cuda -p gpu.simulation.plugin -p no:faulthandler
SOURCES := $(shell find elastic -type f -not -name '*.pyc' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo lint type quick test long simulate rehearse branches docs test-vllm long-vllm drift-vllm test-ray test-clients bench gpu evaluate evaluate-full clean

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
	$(BIN)/pytest -q -m "long and not cuda"

simulate: $(SIMULATED_CUDA)/built ## the tests marked cuda on a simulated GPU: TESTS=, SCHEDULES=, SIMULATED_VENV=
	$(SIMULATED) $(SIMULATED_PYTEST) -n 2 --dist worksteal --schedules "$(SCHEDULES)" $(TESTS)
	$(SIMULATED) SIMCUDA_P2P=0 $(SIMULATED_PYTEST) tests/gpu/memory/test_two_devices.py tests/gpu/memory/test_rank_memory.py  # that cannot reach each other

rehearse: $(SIMULATED_CUDA)/built ## the benchmarks of make gpu with small sizes on a simulated GPU, to see that they run
	mkdir -p build/rehearsal
	$(SIMULATED) $(SIMULATED_VENV)/bin/python benchmarks/run_all.py --machine simulated --device cuda:0 --suite gpu \
		--quick --rounds 1 --results build/rehearsal

branches: $(SIMULATED_CUDA)/built ## which branches for CUDA these tests enter, and which not: TESTS=
	$(SIMULATED_VENV)/bin/pip install -q --disable-pip-version-check coverage
	rm -rf build/branches
	export COVERAGE_FILE=$(CURDIR)/build/branches/data COVERAGE_RCFILE=$(CURDIR)/tests/gpu/simulation/coverage.ini; \
	files=$$(grep -rl --include='*.py' '"cuda"' elastic | paste -sd,); \
	$(SIMULATED) $(subst -m pytest,-m coverage run --include=$$files -m pytest,$(SIMULATED_PYTEST)) \
		-n 2 --dist worksteal $(TESTS); failed=$$?; \
	$(SIMULATED_VENV)/bin/coverage combine -q && $(SIMULATED_VENV)/bin/coverage json -q -o build/branches/seen.json && \
	$(SIMULATED_VENV)/bin/python tests/gpu/simulation/branches.py build/branches/seen.json && exit $$failed

test-vllm: $(VLLM_VENV)/installed ## elastic inside vLLM, on a CPU, and vLLM's benchmark of servers, in a virtual environment of its own: 3 GB
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -W default tests/in_vllm tests/clients/test_vllm_bench.py

long-vllm: $(VLLM_VENV)/installed ## the checks inside vLLM that take minutes: two soaks of ten, and inductor
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -W default -m long tests/in_vllm

drift-vllm: $(VLLM_VENV)/installed ## whether another vLLM (VLLM_DRIFT=, the newest) has what is used of it: only its Python is looked at
	rm -rf build/vllm-drift
	$(VLLM_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --target build/vllm-drift $(VLLM_DRIFT)
	PYTHONPATH=build/vllm-drift $(VLLM_VENV)/bin/python -m pytest -q -W default tests/in_vllm/test_drift.py

test-ray: $(RAY_VENV)/installed ## fleets on Ray, on this machine, in a virtual environment of its own
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -q -W default tests/in_ray

test-clients: $(CLIENTS_VENV)/installed ## the server with GuideLLM, LangChain, LiteLLM, lm-eval, in a virtual environment of its own
	OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest -q tests/clients

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

$(VLLM_VENV)/dependencies: constraints-vllm.txt
	mkdir -p build
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q --disable-pip-version-check --no-deps -r constraints-vllm.txt
	touch $@

$(VLLM_VENV)/installed: $(VLLM_VENV)/dependencies $(SOURCES)
	rm -rf build/lib build/bdist*
	$(VLLM_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

$(RAY_VENV)/dependencies: pyproject.toml $(CONSTRAINTS)
	mkdir -p build
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) ".[dev,ray]"
	touch $@

$(RAY_VENV)/installed: $(RAY_VENV)/dependencies $(SOURCES)
	rm -rf build/lib build/bdist*
	$(RAY_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

$(CLIENTS_VENV)/dependencies: pyproject.toml $(CONSTRAINTS)
	mkdir -p build
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) ".[dev,clients]"
	touch $@

$(CLIENTS_VENV)/installed: $(CLIENTS_VENV)/dependencies $(SOURCES)
	rm -rf build/lib build/bdist*
	$(CLIENTS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

$(SIMULATED_VENV)/bin/pytest: # torch's CUDA build: 5 GB
	mkdir -p build
	sed '/^torch==/d' $(CONSTRAINTS) > build/simulated-constraints.txt
	$(PYTHON) -m venv $(SIMULATED_VENV)
	PIP_EXTRA_INDEX_URL= $(SIMULATED_VENV)/bin/pip install -q --disable-pip-version-check \
		-c build/simulated-constraints.txt -c tests/gpu/constraints.txt ".[dev,cuda]" nvidia-cuda-crt
	$(SIMULATED_VENV)/bin/pip uninstall -q -y elastic-llm

$(SIMULATED_CUDA)/built: $(SIMULATED_VENV)/bin/pytest $(wildcard tests/gpu/simulation/native/*)
	tests/gpu/simulation/native/build.sh $(SIMULATED_VENV)/bin/python $(SIMULATED_CUDA)
	touch $@

clean: ## remove what these made
	rm -rf $(VENV) build *.egg-info
