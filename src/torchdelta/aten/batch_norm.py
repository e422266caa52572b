"""The batch norms that bring running statistics up to date. Needs no torch, so that whoever reads a trace can ask."""

from typing import Final

__all__ = ["BATCH_NORMS", "UNDECLARED_STATISTICS"]

BATCH_NORMS: Final = frozenset(
    {
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
    }
)
"""Ops that write their running statistics (arguments 3 and 4) if argument 5 (training) is true.

Their other outputs do not depend on the statistics then. The first three have no write annotation in their schema.
"""

UNDECLARED_STATISTICS: Final = {
    "batch_norm_update_stats": (1, 2),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
"""Ops that always write their running statistics, without a write annotation, and the positions of these.

`torch.nn.SyncBatchNorm` calls the last one. tape.h in `native/` has the same positions.
"""
