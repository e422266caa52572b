# Every target makes its own .venv first, from python3 alone. `PYTHON=/path/to/python make test` uses that interpreter
# and the packages it already has instead: no .venv, no network.
.DEFAULT_GOAL := help
.PHONY: help ready demo test test-rest test-whole test-all test-sanitized test-cuda check docs figures package native-wheel matrix frameworks bench bench-gpu bench-gpu-smoke sweep clean

ifdef PYTHON
PY := $(PYTHON)
READY :=
DOCS_READY :=
RELEASE_READY :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(CURDIR)/.venv/bin/python
READY := .venv/.ready
DOCS_READY := .venv/.docs
RELEASE_READY := .venv/.release
endif

WORKERS ?= 2
TORCH ?= 2.13.0

help:  ## list the targets
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "  make %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch comes first and alone, so that no later requirement can bring another build of it.
.venv/.ready: pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is older than 3.11: use PYTHON=...")'
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet torch==$(TORCH)
	.venv/bin/python -m pip install --quiet -e '.[cli,dev]'
	@touch $@

.venv/.docs: .venv/.ready
	.venv/bin/python -m pip install --quiet -e '.[docs]'
	@touch $@

.venv/.release: .venv/.ready
	.venv/bin/python -m pip install --quiet -e '.[release]'
	@touch $@

ready: $(READY) $(DOCS_READY)  ## make .venv with what the other targets need

demo: $(READY)  ## train a real model twice, plain and inside half of its memory, and compare
	$(PY) -m torchdelta demo

# Tests start some hundred Python processes: each would compile the package again where bytecode is not kept.
# What is built once (C++, the planners' code) is built before workers need it at the same time.
SPEED := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
PYTEST := $(SPEED) $(PY) -m tests.prepare && $(SPEED) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

test: $(READY)  ## run the tests of every part, with a sample of the long lists (WORKERS=2 processes; 6 minutes)
	$(PYTEST) -m "not rest and not whole"

test-rest: $(READY)  ## run what `make test` leaves out: more of the lists, slow processes, searches
	$(PYTEST) -m "rest and not whole"

test-whole: $(READY)  ## run what both leave out: the long lists to their ends, the longest searches
	$(PYTEST) -m whole

test-all: $(READY)  ## run `test` and `test-rest` in one go
	$(PYTEST) -m "not whole"

check: $(READY)  ## format, lint, types (of the public interface, too), import direction, exports
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m tools.public_types
	$(PY) -m pytest -q tests/test_imports.py tests/test_exports.py

docs: $(DOCS_READY)  ## build the documents into build/docs; a warning or a broken link is an error
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
	@echo "build/docs/index.html"

# The picture of a model is that of its last file.
FOLLOWED := $(addprefix benchmarks/results/following-,delta-2024.json gpt2-like-1-thread.json bert-like-1-thread.json resnet50-1-thread.json gpt2-like.json bert-like.json resnet50.json gpt2-small.json gpt2-small-batch-4.json bert-base.json)

figures: $(READY)  ## put the figures of benchmarks/results/ into README, documents and pictures
	$(PY) -m benchmarks following --picture $(FOLLOWED)
	$(PY) -m tools.figures --write

package: $(RELEASE_READY)  ## build the sdist and the wheel into dist/, and test what is in them
	rm -rf dist
	$(PY) -m build --outdir dist
	TORCHDELTA_DIST=dist $(PY) -m pytest -q tests/package

native-wheel: $(RELEASE_READY)  ## build into dist/ a wheel with the C++ modules prebuilt for the torch that is installed
	$(PY) -m tools.native_wheel

matrix: package  ## try the wheel on every combination of Python and torch that can be had: docs/reference/compatibility.md
	$(PY) -m tools.matrix

frameworks: $(READY)  ## train with axolotl and LLaMA-Factory in environments of their own, and compare the weights
	$(PY) -m tools.frameworks

bench: $(READY)  ## measure: writes into benchmarks/results/
	$(PY) -m benchmarks all

sweep: $(READY)  ## every transformers class and torch.nn module against plain, bit for bit (resumable; WORKERS=2)
	$(PY) -m tools.sweep --workers $(WORKERS)

# The workspaces are small because the tests' models are: by default, two threads' take 65 MiB on a Hopper GPU.
test-cuda: $(READY)  ## run the tests that need a CUDA device; fails where there is none
	@paths=$$($(PY) tests/cuda/ready.py) && TORCHDELTA_TEST_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:16:8 \
		CUBLASLT_WORKSPACE_SIZE=128 $(PY) -m pytest -p no:benchmark -m cuda -o minversion=7 $$paths

test-sanitized: $(READY)  ## run the tests of the C++ modules under the address and the thread sanitizer
	$(PY) -m tools.sanitized

bench-gpu-smoke: $(READY)  ## on a GPU, 5 minutes: same bits, budget by active bytes, overlap, against the peers
	$(PY) -m benchmarks gpu --quick

bench-gpu: $(READY)  ## on a GPU: the same with intervals
	$(PY) -m benchmarks gpu

clean:  ## remove .venv and the caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
