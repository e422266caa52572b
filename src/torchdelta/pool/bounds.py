"""Lower bounds of the footprint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.pool.sections import cut

if TYPE_CHECKING:
    from torchdelta.pool.model import Instance


def max_load_bytes(instance: Instance) -> int:
    """Return the maximal load, sizes rounded up to the alignment: no placement is below it."""
    placed = instance.is_placed
    if not placed.any():
        return 0
    sections = cut(instance.starts[placed], instance.ends[placed], instance.padded_bytes[placed])
    return int(sections.load.max())
