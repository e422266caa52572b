"""The memory tier: swapped bytes stay in host memory, in anonymous mappings that torch's allocator never sees.

On a CPU this frees nothing by itself; it is for tests, for measuring, and for machines whose "device" is a part of
host memory. Whether its bytes count against a budget is the caller's accounting (`used_bytes`).
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from torchdelta.runtime.tiers.pooled import PooledTier

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.copier import Part

__all__ = ["MemoryTier"]

_BLOCK_BYTES: Final = 64  # a cache line: copies from and to whole lines
_PART_BYTES: Final = 16 << 20
# A constant, not a probe: what one core copies on common machines. The first few transfers correct it.
_START_BYTES_PER_S: Final = 4e9


class _MemoryMedium:
    """Anonymous mappings side by side in one range of offsets."""

    name = "memory"
    budget_option = "host_budget"
    block_bytes = _BLOCK_BYTES
    part_bytes = _PART_BYTES
    least_piece_bytes = 4096  # scattering costs next to nothing here
    num_threads = 1
    staging_bytes = 0
    is_walled = True
    start_write_bytes_per_s = _START_BYTES_PER_S
    start_read_bytes_per_s = _START_BYTES_PER_S

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._addresses: list[int] = []
        self._mappings: list[mmap.mmap] = []

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        mapping = mmap.mmap(-1, add_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # In this order: a thread that looks an older offset up at this moment finds starts and addresses that agree.
        self._addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
        self._mappings.append(mapping)
        self._starts.append(from_bytes)

    def write_part(self, worker: int, part: Part) -> None:  # noqa: ARG002 (needs no buffer of its own)
        ctypes.memmove(self._address(part), part.address, part.size_bytes)  # a CDLL function: the GIL is released

    def read_part(self, worker: int, part: Part) -> None:  # noqa: ARG002
        ctypes.memmove(part.address, self._address(part), part.size_bytes)

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()

    def leave_child(self) -> None:
        """Keep the pages: they are copies on write, and freeing them in the child would gain it nothing."""

    def _address(self, part: Part) -> int:
        index = bisect_right(self._starts, part.offset_bytes) - 1
        return self._addresses[index] + part.offset_bytes - self._starts[index]


class MemoryTier(PooledTier):
    """Host memory as a tier.

    Args:
        capacity_bytes: The most that slots may take, or None for no limit (`host_budget`).
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        super().__init__(_MemoryMedium(), capacity_bytes=capacity_bytes)
