"""The body that the memory and the disk tier share: slots in one growing pool, copies in the background, one budget.

The two differ in their medium alone (see `copier.Medium`). The pool grows by doubling, never past the capacity, and
is kept until the tier is closed: a training step needs next what the last one needed.

The budget is kept exactly: a reservation succeeds if, and on a medium with room only if, the bytes of all slots,
each rounded up to the block, stay within the capacity. Fragmentation never makes it fail (see `slots`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError, TierFullError
from torchdelta.runtime.tiers.copier import Copier, CopyTransfer, Medium, Part, PooledSlot
from torchdelta.runtime.tiers.slots import Extent, SlotAllocator

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.base import Slot

__all__ = ["PooledTier"]

_LEAST_GROWTH_BYTES: Final = 16 << 20
_LARGEST_GROWTH_BYTES: Final = 1 << 30

# A memoryview straight over an address: slicing costs no ctypes array type per size, as (c_char * n) would.
_PYBUF_WRITE: Final = 0x200
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

# Open tiers of this process, for the hook that runs in forked children.
_open_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


class PooledTier:
    """A `Tier` over a medium. All state that changes is here and in its copier."""

    def __init__(self, medium: Medium, *, capacity_bytes: int | None) -> None:
        self._medium = medium
        self._capacity_bytes = capacity_bytes
        self._allocator = SlotAllocator(medium.block_bytes)
        self._lock = threading.Lock()  # over the allocator and the ghosts
        self._released: deque[PooledSlot] = deque()  # given back, not yet looked at; see [Note: Finalizers]
        self._ghosts: list[PooledSlot] = []  # given back while copies ran, room still taken
        self._copier = Copier(medium)
        _open_copiers.add(self._copier)
        # Also ends the threads and the file of a tier that nobody closed, and runs at interpreter exit.
        self._finalizer = weakref.finalize(self, self._copier.shutdown)

    @property
    def name(self) -> str:
        """The name that the tier is registered under."""
        return self._medium.name

    @property
    def used_bytes(self) -> int:
        """Bytes of all reserved slots, each rounded up to the block."""
        if self._is_foreign():
            return 0
        with self._lock:
            self._collect_released()
            return self._allocator.used_bytes

    @property
    def peak_used_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self._allocator.peak_used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """The budget, or None."""
        return self._capacity_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory held for bounce buffers."""
        return self._medium.staging_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool has taken from the machine so far; within the capacity."""
        return self._allocator.size_bytes

    @property
    def write_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth into the tier."""
        return self._copier.write_link.bytes_per_s

    @property
    def read_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth out of the tier."""
        return self._copier.read_link.bytes_per_s

    def reserve(self, size_bytes: int) -> PooledSlot:
        """Take room for one buffer; waits for released slots whose copies still run before it gives up."""
        self._check_usable()
        if size_bytes < 0:
            raise TierError(f"a slot cannot have {size_bytes} bytes")
        self._copier.drop_finished()
        while True:
            with self._lock:
                self._collect_released()
                extents, reason = self._take(size_bytes)
                ghost = self._ghosts[0] if self._ghosts else None
            if extents is not None:
                return PooledSlot(size_bytes, extents, self._copier)
            if ghost is None:
                raise TierFullError(self._full_message(size_bytes, reason))
            self._await_jobs(ghost)

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> CopyTransfer:
        """Start copying `storage` into `slot`."""
        pooled = self._checked(slot, storage)
        parts = _cut(pooled, storage, self._medium.part_bytes)
        transfer = self._copier.start(pooled, parts, storage, is_read=False)
        pooled.is_written = True
        return transfer

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> CopyTransfer:
        """Start filling `storage` from `slot`."""
        pooled = self._checked(slot, storage)
        if not pooled.is_written:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is read but was never written")
        parts = _cut(pooled, storage, self._medium.part_bytes)
        return self._copier.start(pooled, parts, storage, is_read=True)

    def release(self, slot: Slot) -> None:
        """Give the slot back. Safe in finalizers: takes no lock with blocking."""
        if not isinstance(slot, PooledSlot) or slot.owner is not self._copier:
            raise TierError(f"a slot that is no slot of this {self.name} tier was given back to it")
        if slot.is_released or self._is_foreign() or self._copier.is_closing:
            return
        slot.is_released = True
        self._released.append(slot)
        # Whoever holds the lock now, or takes it next, looks at what was appended; see [Note: Finalizers].
        if self._lock.acquire(blocking=False):
            try:
                self._collect_released()
            finally:
                self._lock.release()

    def drain(self) -> None:
        """Wait for every transfer under way, and let go of its storage."""
        for transfer in list(self._copier.in_flight.values()):
            with contextlib.suppress(TierError):
                transfer.wait()

    def close(self) -> None:
        """Stop the transfers, join the threads, drop the pool."""
        if self._is_foreign():
            return
        self._finalizer()
        _open_copiers.discard(self._copier)
        with self._lock:
            self._released.clear()
            self._ghosts.clear()
            peak_used_bytes = self._allocator.peak_used_bytes
            self._allocator = SlotAllocator(self._medium.block_bytes)
            self._allocator.peak_used_bytes = peak_used_bytes

    def _is_foreign(self) -> bool:
        return os.getpid() != self._copier.process_id

    def _check_usable(self) -> None:
        self._copier.check_process()
        if self._copier.is_closing:
            raise TierError(f"the {self.name} tier is closed")

    def _checked(self, slot: Slot, storage: torch.UntypedStorage) -> PooledSlot:
        self._check_usable()
        if not isinstance(slot, PooledSlot) or slot.owner is not self._copier:
            raise TierError(f"this slot of {slot.size_bytes} bytes is no slot of this {self.name} tier")
        if slot.is_released:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is used after its release")
        if storage.device.type != "cpu":
            raise TierError(f"the {self.name} tier copies CPU storages only, not one on {storage.device}")
        if storage.nbytes() != slot.size_bytes:
            raise TierError(f"a storage of {storage.nbytes()} bytes meets a slot of {slot.size_bytes} bytes")
        return slot

    def _collect_released(self) -> None:
        """Take back the room of released slots whose copies have ended. Needs the lock."""
        while self._released:
            slot = self._released.popleft()
            self._copier.cancel_unstarted_write(slot)
            self._ghosts.append(slot)
        if self._ghosts:
            # One read of each slot's state: a copy may end between two.
            running = [bool(slot.jobs) for slot in self._ghosts]
            for slot, is_running in zip(self._ghosts, running, strict=True):
                if not is_running:
                    self._allocator.give_back(slot.extents)
            self._ghosts = [slot for slot, is_running in zip(self._ghosts, running, strict=True) if is_running]

    def _await_jobs(self, slot: PooledSlot) -> None:
        try:
            job = slot.jobs[-1]
        except IndexError:  # they have just ended
            return
        job.done.acquire()
        job.done.release()

    def _take(self, size_bytes: int) -> tuple[tuple[Extent, ...] | None, str]:
        """Find room, growing the pool where that is needed and allowed. Needs the lock.

        Returns:
            The extents or None, and for None the reason where it is not the capacity.
        """
        allocator = self._allocator
        need_bytes = allocator.round_up(size_bytes)
        if self._capacity_bytes is not None and allocator.used_bytes + need_bytes > self._capacity_bytes:
            return None, ""
        extents = allocator.take(size_bytes, least_piece_bytes=self._medium.least_piece_bytes)
        if extents is not None:
            return extents, ""
        reason = self._grow(need_bytes)
        return allocator.take(size_bytes, least_piece_bytes=1), reason

    def _grow(self, need_bytes: int) -> str:
        """Grow the pool for a slot of `need_bytes`: generously, else by what is missing at least, else not.

        Returns:
            Why the medium would not grow, or nothing.
        """
        allocator = self._allocator
        generous_bytes = max(need_bytes, min(max(allocator.size_bytes, _LEAST_GROWTH_BYTES), _LARGEST_GROWTH_BYTES))
        if self._capacity_bytes is not None:
            room_bytes = self._capacity_bytes - allocator.size_bytes
            generous_bytes = min(generous_bytes, room_bytes // allocator.block_bytes * allocator.block_bytes)
        reason = ""
        for add_bytes in (generous_bytes, need_bytes - allocator.free_bytes):
            if add_bytes <= 0 or add_bytes > generous_bytes:
                continue
            try:
                self._medium.grow(allocator.size_bytes, add_bytes)
            except (OSError, MemoryError) as error:
                reason = str(error) or type(error).__name__
            else:
                allocator.grow(add_bytes, walled=self._medium.is_walled)
                return ""
        return reason

    def _full_message(self, size_bytes: int, reason: str) -> str:
        capacity = "unlimited" if self._capacity_bytes is None else f"{self._capacity_bytes} bytes"
        blame = f" ({reason})" if reason else ""
        remedy = "free some room there" if reason else f"raise {self._medium.budget_option}"
        return (
            f"the {self.name} tier has no room for {size_bytes} bytes{blame}: capacity {capacity}, "
            f"used {self._allocator.used_bytes} bytes; {remedy}"
        )


def _cut(slot: PooledSlot, storage: torch.UntypedStorage, part_bytes: int) -> list[Part]:
    """Cut a transfer into parts, the same for every transfer of a slot."""
    parts: list[Part] = []
    if slot.size_bytes == 0:
        return parts
    base = storage.data_ptr()
    view: memoryview = _view_memory(base, slot.size_bytes, _PYBUF_WRITE)
    start = 0
    for extent in slot.extents:
        extent_bytes = min(extent.size_bytes, slot.size_bytes - start)
        for offset in range(0, extent_bytes, part_bytes):
            size_bytes = min(part_bytes, extent_bytes - offset)
            parts.append(
                Part(
                    slot=slot,
                    index=len(parts),
                    offset_bytes=extent.offset_bytes + offset,
                    size_bytes=size_bytes,
                    address=base + start + offset,
                    view=view[start + offset : start + offset + size_bytes],
                )
            )
        start += extent_bytes
    return parts


def _leave_children() -> None:
    for copier in list(_open_copiers):
        copier.medium.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_children)
