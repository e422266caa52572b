"""What the fork server imports, once for all processes that judge."""

from __future__ import annotations

import gc
import importlib
import warnings

MODULES = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "benchmarks.sweep.catalog",
    "benchmarks.sweep.transformers_classes",
    "benchmarks.sweep.torch_modules",
)

for name in MODULES:
    importlib.import_module(name)
warnings.filterwarnings("ignore")
# The collector leaves these objects out in every process that is forked from here, and does not touch their pages.
gc.collect()
gc.freeze()
