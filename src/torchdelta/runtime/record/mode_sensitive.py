"""Autograd nodes whose backward gives other bits under a Python dispatch mode, so that none is pushed there.

Their derivative formulas branch on `areAnyTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h), which is true whenever
a dispatch mode is on. A test derives the set from torch's own op database by running every backward with and without a
no-op mode.
"""

from __future__ import annotations

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
