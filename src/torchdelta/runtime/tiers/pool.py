"""A pool of bytes that grows within a capacity: where each slot lies, and when the medium has to grow.

The pool grows by doubling, never beyond the capacity, and is kept until its tier is closed: the next training step
needs as much as the last.

The budget is exact: if the medium has room, a reservation succeeds exactly if the bytes of all slots, each rounded up
to the block, stay within the capacity. Fragmentation never makes it fail (see `slots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierFullError
from torchdelta.runtime.tiers.slots import Extent, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pool"]

_LEAST_GROWTH_BYTES: Final = 16 << 20
_LARGEST_GROWTH_BYTES: Final = 1 << 30


class Pool:
    """The extents of one tier. Not thread-safe: its tier holds a lock.

    Args:
        name: The tier's name, for messages.
        budget_option: The option that limits it, for messages.
        grow: Extends the medium, given its present size and the bytes to add. If it raises OSError or MemoryError, it
            has changed nothing.
        block_bytes: Slots start at, and are rounded up to, multiples of this.
        least_piece_bytes: Scatter a slot over pieces of at least this size before growing.
        is_walled: Whether each growth is a separate piece of memory: then no extent may cross its start.
        capacity_bytes: The most that slots may take, or None for no limit.
        granule_bytes: The medium grows by multiples of this; the block by default.
    """

    def __init__(
        self,
        *,
        name: str,
        budget_option: str,
        grow: Callable[[int, int], None],
        block_bytes: int,
        least_piece_bytes: int,
        is_walled: bool,
        capacity_bytes: int | None,
        granule_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._name = name
        self._budget_option = budget_option
        self._grow_medium = grow
        self._least_piece_bytes = least_piece_bytes
        self._is_walled = is_walled
        self._granule_bytes = granule_bytes or block_bytes
        self._allocator = SlotAllocator(block_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes taken from the machine so far."""
        return self._allocator.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots, each rounded up to the block."""
        return self._allocator.used_bytes

    @property
    def peak_used_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self._allocator.peak_used_bytes

    def take(self, size_bytes: int) -> tuple[tuple[Extent, ...] | None, str]:
        """Find room; grow the pool where that is needed and allowed.

        Returns:
            The extents, or None and the reason; the reason is empty if the capacity is too small.
        """
        allocator = self._allocator
        need_bytes = allocator.round_up(size_bytes)
        if self.capacity_bytes is not None and allocator.used_bytes + need_bytes > self.capacity_bytes:
            return None, ""
        extents = allocator.take(size_bytes, least_piece_bytes=self._least_piece_bytes)
        if extents is not None:
            return extents, ""
        reason = self._grow(need_bytes)
        return allocator.take(size_bytes, least_piece_bytes=1), reason

    def give_back(self, extents: tuple[Extent, ...]) -> None:
        """Free what `take` returned."""
        self._allocator.give_back(extents)

    def clear(self) -> None:
        """Forget everything but the peak: the medium is closed."""
        peak_used_bytes = self._allocator.peak_used_bytes
        self._allocator = SlotAllocator(self._allocator.block_bytes)
        self._allocator.peak_used_bytes = peak_used_bytes

    def full_error(self, size_bytes: int, reason: str) -> TierFullError:
        """Return the error for a slot without room; `reason` is what `take` returned."""
        capacity = "unlimited" if self.capacity_bytes is None else f"{self.capacity_bytes} bytes"
        blame = f" ({reason})" if reason else ""
        remedy = "free some room there" if reason else f"raise {self._budget_option}"
        return TierFullError(
            f"the {self._name} tier has no room for {size_bytes} bytes{blame}: capacity {capacity}, "
            f"used {self.used_bytes} bytes; {remedy}"
        )

    def _grow(self, need_bytes: int) -> str:
        """Grow the pool for a slot of `need_bytes`: try to double it, then to add only the missing bytes.

        Returns:
            Why the medium cannot grow, or an empty string.
        """
        allocator = self._allocator
        generous_bytes = max(need_bytes, min(max(allocator.size_bytes, _LEAST_GROWTH_BYTES), _LARGEST_GROWTH_BYTES))
        least_bytes = self._round_up(need_bytes - allocator.free_bytes)
        generous_bytes = self._round_up(generous_bytes)
        if self.capacity_bytes is not None:
            room_bytes = self.capacity_bytes - allocator.size_bytes
            generous_bytes = min(generous_bytes, room_bytes // self._granule_bytes * self._granule_bytes)
        reason = ""
        for add_bytes in (generous_bytes, least_bytes):
            if add_bytes <= 0 or add_bytes > generous_bytes:
                continue
            try:
                self._grow_medium(allocator.size_bytes, add_bytes)
            except (OSError, MemoryError) as error:
                reason = str(error) or type(error).__name__
            else:
                allocator.grow(add_bytes, walled=self._is_walled)
                return ""
        return reason

    def _round_up(self, size_bytes: int) -> int:
        return -(-size_bytes // self._granule_bytes) * self._granule_bytes
