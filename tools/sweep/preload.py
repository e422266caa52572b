"""What the fork server imports, once for all processes that judge."""

from __future__ import annotations

import gc
import importlib
import warnings

MODULES = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "tools.sweep.catalog",
    "tools.sweep.transformers_classes",
    "tools.sweep.torch_modules",
    "tests.following",
)

for name in MODULES:
    importlib.import_module(name)
warnings.filterwarnings("ignore")
# The collector leaves these objects out in every process that is forked from here, and does not touch their pages.
gc.collect()
gc.freeze()
