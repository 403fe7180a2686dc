# What a developer does here, each on a machine with nothing but Python and make: `make` alone lists it.
#
# PYTHON is the interpreter to start from, TORCH what pip installs as PyTorch (say, torch==2.11.0), WORKERS how many
# processes run tests, VENV where things are installed, each when a command first needs it. Variables of the build, such
# as FLASH_ATTN_CUDA_ARCHS and MAX_JOBS, are described in setup.py.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
SOURCES := $(shell find csrc -type f -not -name '*.pyc' 2>/dev/null)
CUDA_FILES := $(filter %.cu %.cuh %.h %.cpp,$(SOURCES) $(shell find tests -type f))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo train test build wheel kernels-package bench docs lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Threads that wait without spinning: on busy cores the demo is then slow, not stuck.
demo: export OMP_WAIT_POLICY = passive
demo: $(VENV)/for-demo $(VENV)/kernels ## run the demo: two minutes on two cores without a GPU
	$(RUN) examples/demo.py

train: export OMP_WAIT_POLICY = passive
train: $(VENV)/for-train $(VENV)/kernels ## train a small GPT, stop, resume, evaluate, let it write: two minutes on two cores
	$(RUN) training/first_run.py $(TRAIN_ARGS)

# Bytecode spares the processes that tests start, and the next run, compiling each module again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/for-test $(VENV)/kernels ## run the tests that this machine can run, ten minutes on two cores; PYTEST_ARGS="-m slow": the slow ones
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

build: $(VENV)/installed ## build the CUDA library in place, beside CPU-only PyTorch too: half an hour on two slow cores; needs nvcc
	FLASH_ATTENTION_FORCE_BUILD=TRUE $(RUN) setup.py build_ext --inplace

# As pip builds it, but without hiding what it says. FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE leaves the library out.
wheel: $(VENV)/installed ## make a wheel in dist/ with the CUDA library, in the time of a build; needs nvcc
	@FLASH_ATTENTION_FORCE_BUILD=TRUE $(RUN) -c "import build_backend; \
	  build_backend.build_wheel('dist', {'--global-option': ['--quiet']})"

kernels-package: $(VENV)/installed ## write build/kernels as the kernels library loads it, with the CUDA library if it is built
	$(RUN) extras/kernels/make_package.py

bench: $(VENV)/for-bench $(VENV)/kernels ## run all benchmarks; BENCH_ARGS="--plot" also draws them
	set -e; for file in benchmarks/benchmark_*.py; do \
	  $(RUN) -m benchmarks.$$(basename $$file .py) $(BENCH_ARGS); \
	done

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/for-docs ## make the documentation in build/docs/index.html in seconds; a link that leads nowhere is an error
	PYTHONPATH=docs $(RUN) -m mkdocs build
	@echo 'Made build/docs/index.html.'

lint: $(VENV)/for-lint ## check style and types, by ruff, clang-format and mypy: half a minute
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(if $(CUDA_FILES),$(VENV)/bin/clang-format --dry-run --Werror $(CUDA_FILES))

format: $(VENV)/for-lint ## rewrite all files in that style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(if $(CUDA_FILES),$(VENV)/bin/clang-format -i $(CUDA_FILES))

clean: ## remove everything that was made here, but not the runs, data and checkpoints in training/
	rm -rf $(VENV) build demo dist *.egg-info extras/*/build extras/*/*.egg-info flash_attn/_kernels.so flash_attn/_built.txt
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: Python, PyTorch and this package in place; then what a command needs besides (extras of
# pyproject.toml), and the CUDA library where it can be built and run.
EXTRAS_demo := demo
EXTRAS_train := training
EXTRAS_test := test,examples,benchmark,training
EXTRAS_bench := benchmark
EXTRAS_docs := docs
EXTRAS_lint := lint

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Python >= 3.10 is needed: make PYTHON=/path/to/python3.12'; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo '$(PYTHON) cannot make virtual environments: install its venv module (on Debian: python3-venv).'; exit 1; }
	@touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml setup.py build_backend.py
	@echo 'Installing $(TORCH) in $(VENV): with the libraries of CUDA that it needs, this is a download of gigabytes.'
	$(RUN) -m pip install '$(TORCH)' 'setuptools>=77' ninja
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(RUN) -m pip install --quiet --no-build-isolation --editable .
	@touch $@

$(VENV)/for-%: $(VENV)/installed
	@echo 'Installing what `make $*` needs besides: the extras $(EXTRAS_$*) of pyproject.toml.'
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(RUN) -m pip install --no-build-isolation --editable '.[$(EXTRAS_$*)]'
	@touch $@

$(VENV)/kernels: $(VENV)/installed $(SOURCES) $(wildcard flash_attn/_ops/*.py)
	@if $(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  echo 'Building the CUDA kernels.'; \
	  $(RUN) setup.py --quiet build_ext --inplace; \
	else \
	  echo 'PyTorch sees no GPU here: no CUDA kernels are built. (`make build` does it all the same.)'; \
	fi
	@touch $@
