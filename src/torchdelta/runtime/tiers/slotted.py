"""The part that all tiers with a pool share: reserve, check, count and release slots. Subclasses copy the bytes.

`pinned.PinnedTier` copies in the streams of a device, `pooled.PooledTier` in threads of its own.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.tiers.base import Slot, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from torchdelta.runtime.tiers.bandwidth import LinkEstimate
    from torchdelta.runtime.tiers.pool import Pool
    from torchdelta.runtime.tiers.slots import Extent

__all__ = ["Owner", "PlacedSlot", "SlottedTier", "copy_error"]


class Owner:
    """What the slots of a tier know of it: its name and its process. It does not keep the tier alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process_id = os.getpid()

    def is_in_child(self) -> bool:
        """Return whether the calling process is a forked child of the one that opened the tier."""
        return os.getpid() != self.process_id

    def check_process(self) -> None:
        """Refuse to work in a forked child, which has neither the tier's threads nor its file nor its device."""
        if self.is_in_child():
            raise TierError(f"the {self.name} tier belongs to process {self.process_id}: a forked child cannot use it")


class PlacedSlot(Slot):
    """A slot that lies in a pool."""

    __slots__ = ("extents", "failure", "is_released", "is_written", "owner")

    def __init__(self, size_bytes: int, extents: tuple[Extent, ...], owner: Owner) -> None:
        super().__init__(size_bytes)
        self.extents = extents
        self.owner = owner
        self.failure: BaseException | None = None  # of the last write: reads must not return what it left
        self.is_written = False
        self.is_released = False


SlotT = TypeVar("SlotT", bound=PlacedSlot)
TransferT = TypeVar("TransferT", bound=Transfer)


class SlottedTier(ABC, Generic[SlotT, TransferT]):
    """A `Tier` over a pool, without the copies: a subclass starts those, and collects released slots.

    Args:
        owner: The tier's name and process.
        slot_type: The class of its slots.
        pool: Where the slots lie.
        lock: Protects the pool.
        device: The device whose storages the tier copies; None for the CPU, whatever its index.
        links: The bandwidth estimates into the tier and out of it.
        in_flight: The transfers that may still be under way; the subclass updates it.
        shut_down: Ends all copies and frees the memory. Runs once: at `close()`, else when the tier is garbage
            collected or the interpreter exits.
    """

    def __init__(
        self,
        *,
        owner: Owner,
        slot_type: type[SlotT],
        pool: Pool,
        lock: contextlib.AbstractContextManager[Any],
        device: torch.device | None,
        links: tuple[LinkEstimate, LinkEstimate],
        in_flight: Mapping[int, TransferT],
        shut_down: Callable[[], None],
    ) -> None:
        self.owner = owner
        self._slot_type = slot_type
        self._pool = pool
        self.lock = lock
        self._device = device
        self._write_link, self._read_link = links
        self._transfers = in_flight
        self._released: deque[SlotT] = deque()  # `release()` runs in finalizers, which may neither block nor copy
        self._finalizer = weakref.finalize(self, shut_down)

    @property
    def name(self) -> str:
        """The registered name."""
        return self.owner.name

    @property
    def used_bytes(self) -> int:
        """Bytes of all reserved slots, each rounded up to the block."""
        if self.owner.is_in_child():
            return 0
        with self.lock:
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
    def pool_bytes(self) -> int:
        """Bytes that the pool has taken from the machine so far; within the capacity."""
        return self._pool.size_bytes

    @property
    def write_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth into the tier."""
        return self._write_link.bytes_per_s

    @property
    def read_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth out of the tier."""
        return self._read_link.bytes_per_s

    @property
    def write_cpu_s_per_byte(self) -> float:
        """Running estimate of the processor time that a byte written takes."""
        return self._write_link.cpu_s_per_byte

    @property
    def read_cpu_s_per_byte(self) -> float:
        """Running estimate of the processor time that a byte read takes."""
        return self._read_link.cpu_s_per_byte

    def reserve(self, size_bytes: int) -> SlotT:
        """Take room for one buffer; before it fails, wait for the copies of released slots."""
        self._check_usable()
        if size_bytes < 0:
            raise TierError(f"a slot cannot have {size_bytes} bytes")
        self._drop_finished()
        while True:
            with self.lock:
                self._collect_released()
                extents, reason = self._pool.take(size_bytes)
                wait_for_room = self._room_to_come()
            if extents is not None:
                return self._slot_type(size_bytes, extents, self.owner)
            if wait_for_room is None:
                raise self._pool.full_error(size_bytes, reason)
            wait_for_room()

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> TransferT:
        """Start copying `storage` into `slot`."""
        placed = self._checked(slot, storage)
        transfer = self.start_copy(placed, storage, is_read=False)
        placed.is_written = True
        return transfer

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> TransferT:
        """Start filling `storage` from `slot`."""
        return self.start_copy(self.written(self._checked(slot, storage)), storage, is_read=True)

    def map_into(self, slot: Slot, storage: torch.UntypedStorage, keeper: object) -> bool:  # noqa: ARG002
        """Return False: storages cannot have the bytes of slots as their memory."""
        return False

    def release(self, slot: Slot) -> None:
        """Give the slot back. Safe in finalizers: it never blocks, and starts no copy."""
        placed = self._own(slot)
        if placed.is_released or not self._finalizer.alive or self.owner.is_in_child():
            return
        placed.is_released = True
        self._released.append(placed)

    def drain(self) -> None:
        """Wait for every transfer under way, and drop its reference to its storage."""
        for transfer in list(self._transfers.values()):
            with contextlib.suppress(TierError):
                transfer.wait()

    @abstractmethod
    def start_copy(self, slot: SlotT, storage: torch.UntypedStorage, *, is_read: bool) -> TransferT:
        """Start a copy between a slot and a storage."""

    @abstractmethod
    def _drop_finished(self) -> None:
        """Drop the references to storages whose copies have ended."""

    @abstractmethod
    def _collect_released(self) -> None:
        """Give the extents of released slots back to the pool. Needs the lock."""

    def _room_to_come(self) -> Callable[[], None] | None:
        """Return a function that waits until released slots may be free, or None if there are none. Needs the lock."""
        return None

    def _check_usable(self) -> None:
        self.owner.check_process()
        if not self._finalizer.alive:
            raise TierError(f"the {self.name} tier is closed")

    def _own(self, slot: Slot) -> SlotT:
        if not isinstance(slot, self._slot_type) or slot.owner is not self.owner:
            raise TierError(f"this slot of {slot.size_bytes} bytes does not belong to this {self.name} tier")
        return slot

    def reserved(self, slot: Slot) -> SlotT:
        """Return a slot if it is one of this tier, not released yet; raise TierError otherwise."""
        self._check_usable()
        placed = self._own(slot)
        if placed.is_released:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is used after its release")
        return placed

    def written(self, placed: SlotT) -> SlotT:
        """Return a slot if it was written; raise TierError otherwise."""
        if not placed.is_written:
            raise TierError(
                f"a slot of {placed.size_bytes} bytes in the {self.name} tier is read but was never written"
            )
        return placed

    def _checked(self, slot: Slot, storage: torch.UntypedStorage) -> SlotT:
        placed = self.reserved(slot)
        if storage.device != self._device if self._device is not None else storage.device.type != "cpu":
            wanted = "cpu" if self._device is None else self._device
            raise TierError(f"the {self.name} tier copies storages on {wanted} only, not one on {storage.device}")
        if storage.nbytes() != slot.size_bytes:
            raise TierError(f"the storage has {storage.nbytes()} bytes, but its slot has {slot.size_bytes} bytes")
        return placed


def copy_error(name: str, error: BaseException, size_bytes: int, *, is_read: bool) -> TierIOError:
    """Return the error for a transfer of a tier that failed."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    verb = "read" if is_read else "write"
    return TierIOError(f"the {name} tier could not {verb} a buffer of {size_bytes} bytes: {reason}")
