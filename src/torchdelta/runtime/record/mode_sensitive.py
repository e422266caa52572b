"""Autograd nodes whose backward differs under a Python dispatch mode: they run without the recorder.

Their derivative formulas branch on `areAnyTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h), which is true whenever
a dispatch mode is on: some give other bits, some skip a check. tests/same_bits/test_mode_sensitivity.py runs the
backward of torch's own op database with and without a mode, and fails where another node gives other bits.
"""

from __future__ import annotations

import functools
from typing import Final

# Prefixes of `grad_fn.name()`.
MODE_SENSITIVE_NODES: Final = frozenset(
    {
        "ProdBackward",
        "MaskedFillBackward",
        "CumprodBackward",
        "MaskedScatterBackward",
        # These check that the loss is well defined, and skip the check when a mode is on.
        "LinalgEigBackward",
        "LinalgEighBackward",
        "LinalgSvdBackward",
    }
)


def is_mode_sensitive(node_name: str) -> bool:
    """Return whether a node of this name must run without a dispatch mode; the overload's trailing digit is ignored."""
    return node_name.rstrip("0123456789") in MODE_SENSITIVE_NODES


@functools.cache
def makes_mode_sensitive_node(name: str) -> bool:
    """Return whether an op or function, such as `cumprod.default` or `cumprod_`, makes a mode-sensitive node."""
    words = name.partition(".")[0].split("_")
    return "".join(word.capitalize() for word in words) + "Backward" in MODE_SENSITIVE_NODES
