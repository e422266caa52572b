"""The code that the memory and the disk tier share: slots in a growing pool, and threads that copy in the background.

The two differ in their medium only (see `copier.Medium`). The pool keeps the budget (see `pool`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from torchdelta._torch.storages import memory_behind
from torchdelta.runtime.tiers.arena import Segment
from torchdelta.runtime.tiers.copier import Copier, CopyTransfer
from torchdelta.runtime.tiers.jobs import Medium, Part, PooledSlot
from torchdelta.runtime.tiers.pool import Pool
from torchdelta.runtime.tiers.slotted import SlottedTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from torchdelta.runtime.tiers.base import Slot

__all__ = ["PooledTier"]

# Makes a memoryview over an address without a ctypes array type for each size, which (c_char * n) would need.
_PYBUF_WRITE: Final = 0x200
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

# The copiers of open tiers, for the hook that runs in forked children.
_open_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


class PooledTier(SlottedTier[PooledSlot, CopyTransfer]):
    """A `Tier` over a medium. All mutable state is here and in its copier.

    Args:
        medium: Where the bytes are kept.
        capacity_bytes: The most that slots may take, or None for no limit.
        device: The device whose storages it copies; None for the CPU.
    """

    def __init__(self, medium: Medium, *, capacity_bytes: int | None, device: torch.device | None = None) -> None:
        self.medium = medium
        pool = Pool(
            name=medium.name,
            budget_option=medium.budget_option,
            grow=medium.grow,
            block_bytes=medium.block_bytes,
            least_piece_bytes=medium.least_piece_bytes,
            is_walled=medium.is_walled,
            capacity_bytes=capacity_bytes,
        )
        self._pool_lock = threading.Lock()  # over the pool and the ghosts
        self._ghosts: list[PooledSlot] = []  # released while copies ran: their room is still taken
        self._releasing_in = 0  # the thread that gives room back inside of `release`
        self.closes_later = False
        self.copier = Copier(medium)
        super().__init__(
            owner=self.copier.owner,
            slot_type=PooledSlot,
            pool=pool,
            lock=self._pool_lock,
            device=device,
            links=(self.copier.write_link, self.copier.read_link),
            in_flight=self.copier.in_flight,
            shut_down=self.copier.shutdown,
        )
        _open_copiers.add(self.copier)

    @property
    def staging_bytes(self) -> int:
        """Host memory held for staging buffers."""
        return self.medium.staging_bytes

    def release(self, slot: Slot) -> None:
        """Give the slot back. Safe in finalizers: it never blocks on a lock."""
        super().release(slot)
        # Where the lock is held, the thread that holds or takes it next collects the slot; see [Note: Finalizers].
        if self._released and not self.owner.is_in_child() and self._pool_lock.acquire(blocking=False):
            self._releasing_in = threading.get_ident()
            try:
                self._collect_released()
            finally:
                self._releasing_in = 0
                self._pool_lock.release()
                if self.closes_later:
                    self.close()

    def take_stall_s(self) -> float:
        """Return 0.0: `wait()` has returned every stall."""
        return 0.0

    def close(self) -> None:
        """Stop the transfers, join the threads, free the pool."""
        if self.owner.is_in_child():
            return
        # A garbage collection inside of `release` has ended the session: this thread holds the lock, and perhaps the
        # copier's, so `release` closes when it has given them back. See [Note: Finalizers].
        self.closes_later = self._releasing_in == threading.get_ident()
        if self.closes_later:
            return
        self._finalizer()
        _open_copiers.discard(self.copier)
        with self.lock:
            self._released.clear()
            self._ghosts.clear()
            self._pool.clear()

    def start_copy(self, slot: PooledSlot, storage: torch.UntypedStorage, *, is_read: bool) -> CopyTransfer:
        """Hand a copy to the threads."""
        return self.copier.start(slot, self._cut(slot, storage), storage, is_read=is_read)

    def _drop_finished(self) -> None:
        self.copier.drop_finished()

    def _cut(self, slot: PooledSlot, storage: torch.UntypedStorage) -> list[Part]:
        """Split a transfer into parts, the same parts for every transfer of a slot."""
        if slot.size_bytes == 0:
            return []
        base = memory_behind(storage)
        view: memoryview = _view_memory(base, slot.size_bytes, _PYBUF_WRITE)
        return [
            Part(
                slot=slot,
                index=index,
                offset_bytes=offset_bytes,
                size_bytes=size_bytes,
                address=base + start,
                view=view[start : start + size_bytes],
            )
            for index, (start, offset_bytes, size_bytes) in enumerate(self._ranges(slot))
        ]

    def _ranges(self, slot: PooledSlot) -> Iterator[tuple[int, int, int]]:
        """Yield for each part where it starts in the storage, its offset in the pool, and its size."""
        part_bytes = self.medium.part_bytes
        start = 0
        for extent in slot.extents:
            extent_bytes = min(extent.size_bytes, slot.size_bytes - start)
            for offset in range(0, extent_bytes, part_bytes):
                yield start + offset, extent.offset_bytes + offset, min(part_bytes, extent_bytes - offset)
            start += extent_bytes

    def check_readable(self, slot: PooledSlot) -> None:
        """Read a slot part by part, and keep nothing of it.

        Raises:
            TierIOError: It cannot be read.
        """
        block_bytes = max(self.medium.block_bytes, mmap.PAGESIZE)
        scratch_bytes = min(self.medium.part_bytes, -(-slot.size_bytes // block_bytes) * block_bytes)
        scratch = Segment(mmap.mmap(-1, scratch_bytes))
        view = memoryview(scratch.mapping)
        for index, (_, offset_bytes, size_bytes) in enumerate(self._ranges(slot)):
            part = Part(
                slot=slot,
                index=index,
                offset_bytes=offset_bytes,
                size_bytes=size_bytes,
                address=scratch.address,
                view=view[:size_bytes],
            )
            self.copier.start(slot, [part], scratch, is_read=True, is_measured=False).wait()

    def _collect_released(self) -> None:
        """Free the room of released slots whose copies have ended. Needs the lock."""
        while self._released:
            slot = self._released.popleft()
            self._ghosts.append(slot)
            self.copier.cancel_unstarted_write(slot)
        ended = dict.fromkeys(slot for slot in self._ghosts if not slot.jobs)  # read once: a copy may end meanwhile
        for slot in ended:
            self._ghosts.remove(slot)  # first: whatever is raised here, no room may be given back twice
            self._pool.give_back(slot.extents)

    def _room_to_come(self) -> Callable[[], None] | None:
        return functools.partial(_await_jobs, self.copier, self._ghosts[0]) if self._ghosts else None


def _await_jobs(copier: Copier, slot: PooledSlot) -> None:
    with contextlib.suppress(IndexError):  # there is none if they have just ended
        job = slot.jobs[-1]
        copier.hurry(job)
        with job.done:
            pass


def _leave_children() -> None:
    for copier in list(_open_copiers):
        copier.medium.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_children)
