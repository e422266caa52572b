"""Where each slot lies in a pool: best fit over free holes, with coalescing and, if needed, scattering.

Best fit (Knuth, TAOCP 1, 2.5) over holes sorted by length: O(log n) to find a hole, O(n) to shift the sorted list. The
number of holes n is tens in practice, since a training step requests the same sizes repeatedly. Freed extents merge
with their free neighbours. Best fit alone does not bound fragmentation below the total free space. Therefore `take` may
split a request over several holes, and budgets rely on this guarantee:

    a request succeeds exactly if its rounded size is at most the free bytes (`least_piece_bytes` = one block).

Known weakness: a scattered slot costs one transfer per piece, so callers request large pieces first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

__all__ = ["Extent", "SlotAllocator"]


class Extent(NamedTuple):
    """Contiguous bytes in a pool; offset and size are multiples of the pool's block."""

    offset_bytes: int
    size_bytes: int


class SlotAllocator:
    """Hands out extents of a pool that only grows. Not thread-safe: its tier holds a lock."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.size_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self._holes: list[tuple[int, int]] = []  # (size, offset), sorted: best fit is one bisection
        self._size_at: dict[int, int] = {}  # hole offset -> size
        self._offset_ending_at: dict[int, int] = {}  # hole end -> offset
        self._walls: set[int] = set()  # offsets that no extent may cross

    @property
    def free_bytes(self) -> int:
        """Bytes of all holes."""
        return self.size_bytes - self.used_bytes

    @property
    def num_holes(self) -> int:
        """The number of holes: always 1 in an empty pool without walls."""
        return len(self._holes)

    def round_up(self, size_bytes: int) -> int:
        """Return the bytes that a slot of `size_bytes` takes: the next multiple of the block."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def grow(self, size_bytes: int, *, walled: bool = False) -> None:
        """Add `size_bytes` (a multiple of the block) of free space at the end of the pool.

        Args:
            size_bytes: The bytes to add.
            walled: The new space is not contiguous with the old, so no extent may cross its start.
        """
        if walled:
            self._walls.add(self.size_bytes)
        offset = self.size_bytes
        self.size_bytes += size_bytes
        self._add_hole(offset, size_bytes)

    def take(self, size_bytes: int, *, least_piece_bytes: int | None = None) -> tuple[Extent, ...] | None:
        """Take room for `size_bytes`, in one piece if a hole is large enough.

        Args:
            size_bytes: What the slot must hold; rounded up to the block.
            least_piece_bytes: If no hole is large enough, scatter the slot over holes of at least this size. None:
                never scatter.

        Returns:
            The extents in the order in which the bytes fill them (none for size 0), or None if there is no room.
        """
        need_bytes = self.round_up(size_bytes)
        if need_bytes == 0:
            return ()
        index = bisect_left(self._holes, (need_bytes, -1))
        if index < len(self._holes):
            chosen = [self._holes[index]]
        elif least_piece_bytes is None:
            return None
        else:
            chosen = self._gather(need_bytes, least_piece_bytes)
            if not chosen:
                return None
        extents: list[Extent] = []
        for hole_bytes, offset in chosen:
            piece_bytes = min(hole_bytes, need_bytes)
            self._drop_hole(offset, hole_bytes)
            if piece_bytes < hole_bytes:
                self._add_hole(offset + piece_bytes, hole_bytes - piece_bytes)
            extents.append(Extent(offset, piece_bytes))
            need_bytes -= piece_bytes
            self.used_bytes += piece_bytes
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return tuple(extents)

    def give_back(self, extents: tuple[Extent, ...]) -> None:
        """Free extents that `take` returned; each merges with the holes beside it."""
        for extent in extents:
            self.used_bytes -= extent.size_bytes
            self._add_hole(*extent)

    def _gather(self, need_bytes: int, least_piece_bytes: int) -> list[tuple[int, int]]:
        """Choose the fewest holes that hold `need_bytes`, the largest first. Empty if there is not enough room."""
        chosen: list[tuple[int, int]] = []
        for hole in reversed(self._holes):
            if need_bytes <= 0 or hole[0] < least_piece_bytes:
                break
            chosen.append(hole)
            need_bytes -= hole[0]
        return chosen if need_bytes <= 0 else []

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        before = self._offset_ending_at.get(offset)
        if before is not None and offset not in self._walls:
            before_bytes = self._size_at[before]
            self._drop_hole(before, before_bytes)
            offset, size_bytes = before, size_bytes + before_bytes
        end = offset + size_bytes
        after_bytes = self._size_at.get(end)
        if after_bytes is not None and end not in self._walls:
            self._drop_hole(end, after_bytes)
            size_bytes += after_bytes
        insort(self._holes, (size_bytes, offset))
        self._size_at[offset] = size_bytes
        self._offset_ending_at[offset + size_bytes] = offset

    def _drop_hole(self, offset: int, size_bytes: int) -> None:
        del self._holes[bisect_left(self._holes, (size_bytes, offset))]
        del self._size_at[offset]
        del self._offset_ending_at[offset + size_bytes]
