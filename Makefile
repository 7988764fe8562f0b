# Every target works from a fresh clone with Python 3.11+, gcc and make; the first one that needs it creates .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BASE := $(VENV)/.base
KERNELS := $(VENV)/.kernels

.PHONY: help setup kernels wheel demo test test-large quick gpu-test gpu-emulated gpu-sass gpu-bench faults lint type docs bench clean fuzz
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BASE): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,mpi,demo]'
	@touch $@

$(STAMP): $(BASE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(KERNELS): $(BASE) backends/onnxruntime/kernels.txt $(shell find backends/onnxruntime backends/host -name '*.py')
	$(BIN)/python -m graphc.backends.onnxruntime.ahead
	@touch $@

setup: $(STAMP) $(KERNELS)  ## create .venv with everything that development needs

kernels: $(KERNELS)  ## compile native kernels ahead of time, which takes a minute and 3 to 11 s off the first step of a machine

wheel: $(BASE)  ## a wheel in dist/ with native kernels for every level of x86-64 under Linux
	$(BIN)/python -m graphc.backends.onnxruntime.ahead --all
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

demo: $(BASE)  ## train the digits model on two workers (about a minute, installation apart)
	$(BIN)/graphc demo

test: $(STAMP) $(KERNELS)  ## the test suite, lint and types (about 11 minutes on 2 slow cores)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory type
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not mpi and not large"
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "mpi and not faults and not large"

test-large: $(STAMP) $(KERNELS)  ## zoo models of hundreds of megabytes, sweeps, and further cases of tests of `make test` (about 30 minutes)
	$(BIN)/python -m pytest -m large

quick: $(STAMP) $(KERNELS)  ## the quick tier of the tests (90 to 100 s on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not full and not mpi and not large"

faults: $(STAMP)  ## failing data, disks and passes at 20 random moments of a training (5 minutes); more: make fuzz FUZZ="--kind fault"
	$(BIN)/python -m pytest -n 3 tests/runtime/test_faults.py

gpu-test: $(STAMP)  ## the tests that need an NVIDIA GPU (pip install 'graphc[gpu]'); writes build/gpu_test.json
	failed=0; \
	timeout -s KILL 3600 $(BIN)/python -m pytest -m "gpu and not alone" -rs -n 4 --dist load --max-worker-restart 40 \
	  --timeout 240 --timeout-method thread --results build/gpu_test.json || failed=1; \
	timeout -s KILL 600 $(BIN)/python -m pytest -m "gpu and alone" -rs --timeout 240 --timeout-method thread \
	  --results build/gpu_test_alone.json || failed=1; \
	exit $$failed

gpu-emulated: $(STAMP)  ## tests of a GPU on the CPU, with the real CuPy on a made-up CUDA (tests/hostcuda/README.md)
	$(BIN)/python tests/hostcuda/build.py tests -n 2 --dist worksteal --timeout 900 -rs

gpu-sass: $(STAMP)  ## registers, occupancy and bytes in flight of the GPU jobs' kernels, by the real NVRTC without a GPU (2 minutes)
	$(BIN)/python scripts/gpu_sass.py

fuzz: $(STAMP)  ## mutants of models, data, checkpoints, command lines; rogue peers; faults: FUZZ="--kind model --count 1000 --seed 0"
	$(BIN)/python -m tests.fuzz $(FUZZ)

lint: $(STAMP)  ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checker and API reference read an installed copy: in an editable install they do not find passes/ and backends/.
type: $(STAMP)  ## mypy --strict over the installed packages
	@rm -rf build/typed build/lib && mkdir -p build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/typed .
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p graphc

docs: $(STAMP)  ## the documentation as a site in build/site, with every warning an error
	@rm -rf build/docs build/lib && mkdir -p build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/docs .
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP) $(KERNELS)  ## step times against PyTorch; writes build/bench.json
	$(BIN)/graphc bench --output build/bench.json

gpu-bench: $(STAMP)  ## step times on an NVIDIA GPU beside PyTorch's; writes build/gpu_bench.json (under 10 minutes)
	$(BIN)/python -m graphc.bench.gpu --output build/gpu_bench.json

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist backends/onnxruntime/ahead_of_time *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
