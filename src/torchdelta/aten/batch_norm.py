"""The batch norms that bring running statistics up to date. Needs no torch, so that whoever reads a trace can ask."""

from typing import Final

__all__ = ["BATCH_NORMS", "STATISTICS_POSITIONS", "TRAINING_POSITION", "is_out", "undeclared_statistics"]

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

STATISTICS_POSITIONS: Final = (3, 4)
TRAINING_POSITION: Final = 5

_UNDECLARED_STATISTICS: Final = {
    "batch_norm_update_stats": (1, 2),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
"""Ops that always write their running statistics, without a write annotation, and the positions of these.

`torch.nn.SyncBatchNorm` calls the last one. tape.h in `native/` has the same positions.
"""


def is_out(overload_name: str) -> bool:
    """Return whether an overload of one of `BATCH_NORMS` writes its results into tensors that it is given."""
    return overload_name.endswith("out")


def undeclared_statistics(base_name: str, overload_name: str) -> tuple[int, ...]:
    """Return the positions of running statistics that an op counts as writing, whatever its schema says.

    A batch norm that returns new tensors writes none here: its replays hide the statistics.
    """
    if base_name in BATCH_NORMS and overload_name == "out":
        return STATISTICS_POSITIONS
    return _UNDECLARED_STATISTICS.get(base_name, ())
