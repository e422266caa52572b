"""Transfers as the copier's threads see them: jobs of parts, and the medium that copies a part."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from torchdelta.runtime.tiers.slotted import Owner, PlacedSlot

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.slots import Extent

__all__ = ["Job", "Medium", "Part", "PooledSlot"]


class Part:
    """A piece of a transfer that one thread copies at once."""

    __slots__ = ("address", "after", "index", "offset_bytes", "size_bytes", "slot", "view")

    def __init__(
        self, *, slot: PooledSlot, index: int, offset_bytes: int, size_bytes: int, address: int, view: memoryview
    ) -> None:
        self.slot = slot
        self.index = index
        self.offset_bytes = offset_bytes  # in the pool
        self.size_bytes = size_bytes
        self.address = address  # of the storage's bytes
        self.view = view  # the same bytes; made by the caller so that the thread does not allocate
        self.after: Any = None  # the event that a device's copy waits for; `view` of device memory is never read


class Medium(Protocol):
    """The storage of a pooled tier. The copier's threads call `write_part` and `read_part` only."""

    name: str
    budget_option: str  # the option that limits it, for messages
    block_bytes: int  # slots start at, and are rounded up to, multiples of this
    part_bytes: int  # the longest part that one thread copies at once; a multiple of the block
    least_piece_bytes: int  # scatter a slot over pieces of at least this size before growing
    num_threads: int
    staging_bytes: int
    is_walled: bool  # whether each growth is a separate piece of memory: then no extent may cross its start
    start_write_bytes_per_s: float
    start_read_bytes_per_s: float

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Add room after the first `from_bytes`; if it raises OSError or MemoryError, it has changed nothing."""

    def write_part(self, worker: int, part: Part) -> None:
        """Copy one part into the pool."""

    def read_part(self, worker: int, part: Part) -> None:
        """Copy one part out of the pool."""

    def close(self) -> None:
        """Free everything; called once, after the last copy."""

    def leave_child(self) -> None:
        """Free what a forked child inherited, without any effect on the parent."""


class PooledSlot(PlacedSlot):
    """A slot in a pool, and its jobs in the order in which they were started."""

    __slots__ = ("checksums", "jobs", "num_reads")

    def __init__(self, size_bytes: int, extents: tuple[Extent, ...], owner: Owner) -> None:
        super().__init__(size_bytes, extents, owner)
        self.jobs: deque[Job] = deque()
        self.num_reads = 0  # among jobs
        self.checksums: dict[int, int] = {}  # part index -> checksum of what was written, where the medium keeps any


class Job:
    """One transfer, for the threads."""

    __slots__ = (
        "done",
        "error",
        "is_finished",
        "is_measured",
        "is_read",
        "is_urgent",
        "key",
        "next_part",
        "num_parts",
        "num_running",
        "parts",
        "slot",
    )

    def __init__(
        self, key: int, slot: PooledSlot, parts: list[Part], *, is_read: bool, is_measured: bool = True
    ) -> None:
        self.key = key
        self.slot = slot
        self.parts = parts
        self.is_read = is_read
        self.is_measured = is_measured  # whether the estimates learn from it
        self.is_urgent = False
        self.num_parts = len(parts)  # [Note: No memory]: a number above 256 is an object
        self.next_part = 0
        self.num_running = 0
        self.error: BaseException | None = None
        self.is_finished = False
        self.done = threading.Lock()  # held until the job has finished: lighter than an Event
        self.done.acquire()
