"""Host memory that a device copies from and to by itself: a few large segments, each pinned once.

Why not torch's pinned tensors: its caching host allocator rounds every size up to a power of two, keeps freed blocks
for ever, and asks the driver for one block at a time, milliseconds each. Here a segment is an anonymous mapping that is
registered with the device as it is, and goes back to the system when its tier is closed.

Shared mappings, not private ones: after a fork, the first write to a private page gives the parent another page than
the one that the device was told of.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.engine import Engine

__all__ = ["Arena", "PinnedMemory", "Segment"]


# Engines that would not pin: asked and told of once.
_refusing: weakref.WeakSet[Engine] = weakref.WeakSet()


class Segment:
    """A run of host memory, page-aligned, pinned where the system allows it."""

    __slots__ = ("address", "is_pinned", "mapping", "size_bytes")

    def __init__(self, mapping: mmap.mmap, address: int, *, is_pinned: bool) -> None:
        self.mapping = mapping
        self.address = address
        self.size_bytes = len(mapping)
        self.is_pinned = is_pinned


class PinnedMemory:
    """The segments of one tier.

    Attributes:
        size_bytes: Bytes of all segments.
    """

    def __init__(self, engine: Engine) -> None:
        self.size_bytes = 0
        self._engine = engine
        self._segments: list[Segment] = []

    def take(self, size_bytes: int) -> Segment:
        """Map and pin a segment; a whole number of pages leaves nothing unused.

        Raises:
            OSError: The system has no such memory.
        """
        mapping = mmap.mmap(-1, size_bytes)
        segment = Segment(mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)), is_pinned=False)
        if self._engine not in _refusing:
            try:
                self._engine.pin(segment.address, size_bytes)
                segment.is_pinned = True
            except OSError as error:
                _refusing.add(self._engine)  # copies work without, so the memory is taken all the same
                logging.getLogger("torchdelta").warning(
                    "host memory cannot be pinned (%s): copies from and to %s are slower", error, self._engine.device
                )
        self._segments.append(segment)
        self.size_bytes += size_bytes
        return segment

    def close(self) -> None:
        """Give everything back; no copy runs any more."""
        while self._segments:
            segment = self._segments.pop()
            if segment.is_pinned:
                with contextlib.suppress(RuntimeError):  # a device that has failed, or has gone at exit
                    self._engine.unpin(segment.address)
            segment.mapping.close()
        self.size_bytes = 0


class Arena:
    """Segments side by side in one range of offsets."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self._starts: list[int] = []
        self._addresses: list[int] = []

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Add a segment behind the first `from_bytes`; raises OSError and then has changed nothing."""
        self._addresses.append(self._memory.take(add_bytes).address)
        self._starts.append(from_bytes)

    def address_of(self, offset_bytes: int) -> int:
        """Return where an offset lies; what follows it in the same extent lies behind it."""
        index = bisect_right(self._starts, offset_bytes) - 1
        return self._addresses[index] + offset_bytes - self._starts[index]
