"""The body that the memory and the disk tier share: slots in one growing pool, copies in the background, one budget.

The two differ in their medium alone (see `copier.Medium`). Room and budget are the pool's business (see `pool`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError
from torchdelta.runtime.tiers.copier import Copier, CopyTransfer, Medium, Part, PooledSlot
from torchdelta.runtime.tiers.pool import Pool

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.base import Slot

__all__ = ["PooledTier"]

# A memoryview straight over an address: slicing costs no ctypes array type per size, as (c_char * n) would.
_PYBUF_WRITE: Final = 0x200
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

# Open tiers of this process, for the hook that runs in forked children.
_open_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


class PooledTier:
    """A `Tier` over a medium. All state that changes is here and in its copier.

    Args:
        medium: Where the bytes are kept.
        capacity_bytes: The most that slots may take, or None for no limit.
        device: Whose storages it copies; None is the CPU.
    """

    def __init__(self, medium: Medium, *, capacity_bytes: int | None, device: torch.device | None = None) -> None:
        self._medium = medium
        self._device = device
        self._pool = Pool(
            name=medium.name,
            budget_option=medium.budget_option,
            grow=medium.grow,
            block_bytes=medium.block_bytes,
            least_piece_bytes=medium.least_piece_bytes,
            is_walled=medium.is_walled,
            capacity_bytes=capacity_bytes,
        )
        self._lock = threading.Lock()  # over the pool and the ghosts
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
            return self._pool.used_bytes

    @property
    def peak_used_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self._pool.peak_used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """The budget, or None."""
        return self._pool.capacity_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory held for bounce buffers."""
        return self._medium.staging_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool has taken from the machine so far; within the capacity."""
        return self._pool.size_bytes

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
                extents, reason = self._pool.take(size_bytes)
                ghost = self._ghosts[0] if self._ghosts else None
            if extents is not None:
                return PooledSlot(size_bytes, extents, self._copier)
            if ghost is None:
                raise self._pool.full_error(size_bytes, reason)
            self._await_jobs(ghost)

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> CopyTransfer:
        """Start copying `storage` into `slot`."""
        pooled = self._checked(slot, storage)
        parts = self._cut(pooled, storage)
        transfer = self._copier.start(pooled, parts, storage, is_read=False)
        pooled.is_written = True
        return transfer

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> CopyTransfer:
        """Start filling `storage` from `slot`."""
        pooled = self._checked(slot, storage)
        if not pooled.is_written:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is read but was never written")
        parts = self._cut(pooled, storage)
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

    def take_stall_s(self) -> float:
        """Return nothing: `wait()` has told all of it."""
        return 0.0

    def close(self) -> None:
        """Stop the transfers, join the threads, drop the pool."""
        if self._is_foreign():
            return
        self._finalizer()
        _open_copiers.discard(self._copier)
        with self._lock:
            self._released.clear()
            self._ghosts.clear()
            self._pool.clear()

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
        if storage.device != self._device if self._device is not None else storage.device.type != "cpu":
            wanted = "CPU" if self._device is None else self._device
            raise TierError(f"the {self.name} tier copies {wanted} storages only, not one on {storage.device}")
        if storage.nbytes() != slot.size_bytes:
            raise TierError(f"a storage of {storage.nbytes()} bytes meets a slot of {slot.size_bytes} bytes")
        return slot

    def _cut(self, slot: PooledSlot, storage: torch.UntypedStorage) -> list[Part]:
        """Cut a transfer into parts, the same for every transfer of a slot."""
        part_bytes = self._medium.part_bytes
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
                    self._pool.give_back(slot.extents)
            self._ghosts = [slot for slot, is_running in zip(self._ghosts, running, strict=True) if is_running]

    def _await_jobs(self, slot: PooledSlot) -> None:
        try:
            job = slot.jobs[-1]
        except IndexError:  # they have just ended
            return
        job.done.acquire()
        job.done.release()


def _leave_children() -> None:
    for copier in list(_open_copiers):
        copier.medium.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_children)
