"""Host memory for copies by a device: a few large segments, each pinned once.

Torch's pinned tensors do not fit: the caching host allocator rounds every size up to a power of two, never frees
blocks, and takes one block at a time from the driver, at milliseconds each. Here a segment is an anonymous mapping that
is registered with the device, and is unmapped when its tier is closed.

The mappings are shared, not private: after a fork, the first write to a private page moves it to another physical page
than the one that is registered with the device.
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
    from collections.abc import Callable

    from torchdelta.runtime.tiers.engine import Engine

__all__ = ["Arena", "PinnedMemory", "Segment"]


# Engines that refused to pin: they are not tried again, and are logged once.
_refusing: weakref.WeakSet[Engine] = weakref.WeakSet()


class Segment:
    """Contiguous page-aligned host memory, pinned where the system allows it."""

    __slots__ = ("address", "is_pinned", "mapping", "size_bytes")

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.size_bytes = len(mapping)
        self.is_pinned = False


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
        """Map and pin a segment; its size should be a whole number of pages.

        Raises:
            OSError: The system has no such memory.
        """
        segment = Segment(mmap.mmap(-1, size_bytes))
        if self._engine not in _refusing:
            try:
                self._engine.pin(segment.address, size_bytes)
                segment.is_pinned = True
            except OSError as error:
                _refusing.add(self._engine)  # copies work without pinning, so the memory is taken anyway
                logging.getLogger("torchdelta").warning(
                    "host memory cannot be pinned (%s): copies from and to %s are slower", error, self._engine.device
                )
        self._segments.append(segment)
        self.size_bytes += size_bytes
        return segment

    def close(self) -> None:
        """Unpin and unmap everything; no copy may be running."""
        while self._segments:
            segment = self._segments.pop()
            if segment.is_pinned:
                with contextlib.suppress(RuntimeError):  # the device has failed, or is gone at exit
                    self._engine.unpin(segment.address)
            segment.mapping.close()
        self.size_bytes = 0


class Arena:
    """Segments one after the other in one range of offsets.

    Args:
        take: Returns a new segment of that many bytes; raises OSError or MemoryError if there is no such memory.
    """

    def __init__(self, take: Callable[[int], Segment]) -> None:
        self._take = take
        self._starts: list[int] = []
        self._addresses: list[int] = []

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Add a segment behind the first `from_bytes`; on an error nothing has changed."""
        # In this order: a thread that looks an older offset up at this moment finds starts and addresses that agree.
        self._addresses.append(self._take(add_bytes).address)
        self._starts.append(from_bytes)

    def address_of(self, offset_bytes: int) -> int:
        """Return the address of an offset; the rest of its extent follows it."""
        index = bisect_right(self._starts, offset_bytes) - 1
        return self._addresses[index] + offset_bytes - self._starts[index]
