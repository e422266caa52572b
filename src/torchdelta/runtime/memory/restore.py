"""Brings buffers back: from a storage that still has their content, from the tier, or by a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import storage_behind
from torchdelta.errors import SavedTensorError, TierError, TierIOError
from torchdelta.native.caching import new_storage
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.runtime.memory.replay import Replayer
from torchdelta.runtime.state.kinds import byte_alias

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.buffer import Buffer, StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Restorer", "check_size"]

# DELTA 2022 prefetches at most five offloaded tensors (papers.md 1.2).
PREFETCH_DEPTH: Final = 5


class Restorer:
    """Brings buffers back.

    Args:
        ledger: The ledger.
        room: Makes room for what is brought back.
        prefetches: Whether swapped buffers are brought back ahead of their use.
    """

    def __init__(self, ledger: Ledger, room: Room, *, prefetches: bool) -> None:
        self.ledger = ledger
        self.room = room
        self.transfers = room.transfers
        self.device = room.device
        self.prefetches = prefetches
        self.replayer = Replayer(ledger, room, self.bring)

    def bring(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return a storage with this buffer's content. Swap it in or recompute it if it is not resident.

        Raises:
            SavedTensorError: The content is lost.
            TierIOError: Its only copy cannot be read.
            ReplayError: Its replay gave a different result.
        """
        if self.ledger.num_emptied and buffer.record is not None and buffer.record.emptied is not None:
            persistents = self.room.persistents
            assert persistents is not None
            persistents.bring_record(buffer.record)
        storage = resident(buffer)
        buffer.last_used = self.ledger.clock
        if storage is not None:
            check_size(buffer, storage)
            return storage
        with self.device.exclusive():
            return self._bring_back(buffer)

    def _bring_back(self, buffer: Buffer) -> torch.UntypedStorage:
        storage = self.transfers.take_fetched(buffer)
        if storage is not None:
            self.ledger.brought_back(buffer, storage)
            return storage
        if buffer.copy is not None:
            try:
                return self._swap_in(buffer)
            except TierError as error:
                self.transfers.outage.begin(self.ledger.clock, error)
                if buffer.op is None:
                    msg = f"a saved {_name(buffer)} cannot be brought back: {error}"
                    raise TierIOError(msg) from error  # the copy stays: the disk may work again at the next attempt
                self.ledger.uncopied(buffer)
        if buffer.op is None:
            msg = (
                f"the content of a saved {_name(buffer)} is lost, because code that is not recorded overwrote it: "
                "keep the MemoryBudget open around the whole loop"
            )
            raise SavedTensorError(msg)
        return self.replayer.recompute(buffer)

    def _swap_in(self, buffer: Buffer) -> torch.UntypedStorage:
        copy = buffer.copy
        assert copy is not None
        self.room.make(buffer.size_bytes, "swap-in")
        storage = self.new_storage(buffer.size_bytes)
        self.ledger.know(storage)
        self.transfers.read(copy, storage)
        # Only after it is filled: if the read fails, the buffer is still away.
        self.ledger.brought_back(buffer, storage)
        return storage

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        """Allocate the storage that a copy is read into."""
        return new_storage(size_bytes, self.ledger.new_device)

    def prefetch(self, save_order: int) -> None:
        """Start bringing back the swapped buffers that backward needs next, as long as they fit without an eviction.

        Backward next needs the buffers saved last before `save_order`.
        """
        if self.ledger.surveys:
            return
        needed = self.transfers.needed_before(save_order, PREFETCH_DEPTH)
        if needed and self.prefetches:
            with self.device.exclusive():
                self._fetch_ahead(needed)

    def _fetch_ahead(self, needed: list[Buffer]) -> None:
        for buffer in needed:
            if buffer.copy is None or buffer.fetching is not None or resident(buffer) is not None:
                continue
            if not self.room.has(buffer.size_bytes + 2 * self.room.largest_request_bytes):
                return
            try:
                with Quietly():
                    storage = self.new_storage(buffer.size_bytes)
                self.transfers.start_fetch(buffer, buffer.copy, storage)
            except (RuntimeError, TierError) as error:
                if isinstance(error, TierError) or is_out_of_memory(error):
                    return  # nothing needs it yet: `bring` will read it when something does
                raise

    # -- content that is overwritten

    def before_write(self, record: StorageRecord, storage: torch.UntypedStorage) -> Buffer | None:
        """Invalidate a storage's content, because an op is about to overwrite it.

        If no op recomputes this content and the replay of a dropped buffer reads it, it is copied first: on the device
        if the budget has room, else to the tier.

        Returns:
            The buffer whose content ends here.
        """
        buffer = record.current
        if buffer is None:
            return None
        self.transfers.finish_copy(buffer)
        if record.spare is not None and self.room.persistents is not None:
            self.room.persistents.emptying.spoil(record)
        is_lost = buffer.op is None and buffer.copy is None and buffer.num_views > 0
        is_needed = is_lost and self.room.costs.is_needed_by_replay(buffer)
        self.ledger.invalidate(record)
        if is_needed:
            try:
                self._preserve(buffer, storage)
            except BaseException:  # the op will not run
                self.ledger.reinstate(record, buffer, byte_alias(storage))
                raise
        elif is_lost:
            self.room.costs.note_lost(buffer)
        return buffer

    def _preserve(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        self.room.counters.num_copies_before_write += 1
        if self.ledger.surveys:
            if not self.transfers.copy_storage(buffer, storage):
                self.room.make(buffer.size_bytes, "a copy before an in-place op")
                self.ledger.brought_back(buffer, self.new_storage(buffer.size_bytes), held=True)
            return
        with self.device.exclusive(), Quietly():  # replays read the clone on the home stream; the write waits for it
            if not self.room.has(buffer.size_bytes):
                self.transfers.copy_storage(buffer, storage)
                if self.transfers.finish_copy(buffer):
                    return
                self.room.make(buffer.size_bytes, "a copy before an in-place op")
            clone = byte_alias(storage).clone()
            self.ledger.brought_back(buffer, storage_behind(clone), held=True)


def check_size(buffer: Buffer, storage: torch.UntypedStorage) -> None:
    """Check that a storage still has the size of its buffer.

    Raises:
        SavedTensorError: It was shrunk, so the content is lost.
    """
    if storage.nbytes() < buffer.size_bytes:
        msg = (
            f"the content of a saved {_name(buffer)} is lost: its storage was resized to {storage.nbytes()} bytes "
            "before backward; resize it after backward"
        )
        raise SavedTensorError(msg)


def _name(buffer: Buffer) -> str:
    return f"{buffer.origin or 'tensor'} of {buffer.size_bytes} bytes"
