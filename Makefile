# Every target makes its own .venv first, from python3 alone. `PYTHON=/path/to/python make test` uses that interpreter
# and the packages it already has instead: no .venv, no network.
.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all test-cuda check bench bench-gpu bench-gpu-smoke sweep clean

ifdef PYTHON
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(CURDIR)/.venv/bin/python
READY := .venv/.ready
endif

WORKERS ?= 2

help:  ## list the targets
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "  make %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch comes first and alone, so that no later requirement can bring another build of it.
.venv/.ready: pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is older than 3.11: use PYTHON=...")'
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet -e '.[cli,dev]'
	@touch $@

demo: $(READY)  ## train a real model twice, plain and inside half of its memory, and compare
	$(PY) -m torchdelta demo

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

test: $(READY)  ## run the tests of every part, with a sample of the long lists (WORKERS=2 processes; 5 to 7 minutes)
	$(PYTEST) -m "not rest"

test-rest: $(READY)  ## run what `make test` leaves out: the whole lists, slow processes, long searches
	$(PYTEST) -m rest

test-all: $(READY)  ## run both
	$(PYTEST)

check: $(READY)  ## format, lint, types, import direction, exports
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m pytest -q tests/test_imports.py tests/test_exports.py

bench: $(READY)  ## measure: writes into benchmarks/results/
	$(PY) -m benchmarks all

sweep: $(READY)  ## every transformers class and torch.nn module against plain, bit for bit (resumable; WORKERS=2)
	$(PY) -m tools.sweep --workers $(WORKERS)

test-cuda: $(READY)  ## run the tests that need a CUDA device; fails where there is none
	@paths=$$($(PY) tests/cuda/ready.py) && TORCHDELTA_TEST_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8 \
		$(PY) -m pytest -m cuda -o minversion=7 $$paths

bench-gpu-smoke: $(READY)  ## on a GPU, 5 minutes: same bits, budget by active bytes, overlap, against the peers
	$(PY) -m benchmarks gpu --quick

bench-gpu: $(READY)  ## on a GPU: the same with intervals
	$(PY) -m benchmarks gpu

clean:  ## remove .venv and the caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
