"""The memory tier: evicted bytes are kept in host memory, in anonymous mappings outside torch's allocator.

On a CPU this alone frees no memory. It is for tests, for measurements, and for machines whose "device" is a part of
host memory. The caller decides whether its bytes count against a budget (`used_bytes`).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Final

from torchdelta.runtime.tiers.arena import Arena, Segment
from torchdelta.runtime.tiers.pooled import PooledTier

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.jobs import Part

__all__ = ["MemoryTier"]

_BLOCK_BYTES: Final = 64  # a cache line
_PART_BYTES: Final = 16 << 20
# A constant, not a probe: the copy bandwidth of one core on common machines. The first few transfers correct it.
_START_BYTES_PER_S: Final = 4e9


class _MemoryMedium:
    """Anonymous mappings, one after the other in one range of offsets."""

    name = "memory"
    budget_option = "host_budget"
    block_bytes = _BLOCK_BYTES
    part_bytes = _PART_BYTES
    least_piece_bytes = 4096  # scattering is cheap here
    num_threads = 1
    staging_bytes = 0
    is_walled = True
    start_write_bytes_per_s = _START_BYTES_PER_S
    start_read_bytes_per_s = _START_BYTES_PER_S

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._arena = Arena(self._map)
        self.grow = self._arena.grow

    def write_part(self, worker: int, part: Part) -> None:  # noqa: ARG002 (needs no buffer of its own)
        ctypes.memmove(
            self._arena.address_of(part.offset_bytes), part.address, part.size_bytes
        )  # a CDLL function: the GIL is released

    def read_part(self, worker: int, part: Part) -> None:  # noqa: ARG002
        ctypes.memmove(part.address, self._arena.address_of(part.offset_bytes), part.size_bytes)

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()

    def leave_child(self) -> None:
        """Keep the pages: they are copy-on-write, so freeing them in the child would free no memory."""

    def _map(self, size_bytes: int) -> Segment:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mappings.append(mapping)
        return Segment(mapping)


class MemoryTier(PooledTier):
    """Host memory as a tier.

    Args:
        capacity_bytes: The most that slots may take, or None for no limit (`host_budget`).
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        super().__init__(_MemoryMedium(), capacity_bytes=capacity_bytes)
