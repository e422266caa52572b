"""Moves the content of storages to the tier and back, in place: their memory is freed, and later allocated again.

A *spare* copy is a copy of a storage that still has its content. As long as the storage is only read, it can be emptied
without a transfer. A spare is left where a storage was refilled, or made in the background before the memory is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta._torch.storages import resize_storage
from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.runtime.state.copies import Emptied

if TYPE_CHECKING:
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.copies import TierCopy
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Emptying"]


class Emptying:
    """Empties storages in place and refills them. Which ones, others decide."""

    def __init__(self, ledger: Ledger, transfers: Transfers) -> None:
        self.num_emptied = 0  # over the whole session
        self.num_read_ahead = 0  # refills that were started before their use
        self.spares: dict[int, StorageRecord] = {}  # records that may have a spare, by id
        self.emptied: dict[int, StorageRecord] = {}  # records that are emptied, and some that are back, by id
        self._ledger = ledger
        self._transfers = transfers

    # -- out

    def has_spare(self, record: StorageRecord) -> bool:
        """Return whether a storage has a spare copy of what it holds now, perhaps one that is still being made."""
        spare = record.spare
        return spare is not None and spare.content is not None and spare.content is record.current

    def is_clean(self, record: StorageRecord) -> bool:
        """Return whether a storage can be emptied without waiting for a transfer."""
        return self.has_spare(record) and record.spare is not None and record.spare.copy.is_there()

    def make_spare(self, record: StorageRecord) -> bool:
        """Start making a spare copy. Return whether that was possible.

        Only a content that the recorder knows can have one: otherwise nothing would show that it was overwritten.
        """
        storage = record.storage()
        if storage is None or record.current is None:
            return False
        copy = self._transfers.start_copy(storage)
        if copy is None:
            return False
        copy.source = None  # the program may free the storage before the record knows that the copy has ended
        self.spoil(record)
        record.spare = Emptied(copy, record.size_bytes, record.current)
        self.spares[record.id] = record
        return True

    def empty(self, records: list[StorageRecord]) -> bool:
        """Empty storages in place. Return whether all could be copied."""
        copies: list[tuple[StorageRecord, TierCopy | None]] = []
        for record in records:
            if self.has_spare(record) and record.spare is not None:
                copies.append((record, record.spare.copy))
            else:
                storage = record.storage()
                assert storage is not None
                self.spoil(record)
                copies.append((record, self._transfers.start_copy(storage)))
        is_complete = True
        for record, copy in copies:
            if copy is None or not self._transfers.arrive(copy):
                record.spare = None
                is_complete = False
                continue
            storage = record.storage()
            assert storage is not None
            content = Emptied(copy, record.size_bytes, record.current)
            resize_storage(storage, 0)
            self.emptied[record.id] = record
            self._ledger.emptied(record, storage, content)
            self.num_emptied += 1
        return is_complete

    # -- back

    def start_refill(self, record: StorageRecord) -> bool:
        """Allocate the memory of an emptied storage and start filling it. Return whether that was possible."""
        content, storage = record.emptied, record.storage()
        if content is None or storage is None:
            return False
        try:
            resize_storage(storage, content.size_bytes)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return False
            raise
        try:
            content.transfer = content.copy.tier.read(content.copy.slot, storage)
        except TierError:
            resize_storage(storage, 0)  # its use reads it once more, and raises if that fails, too
            return False
        self._ledger.resize(record, storage, content.size_bytes)
        self._transfers.counters.swapped_in_bytes += content.size_bytes
        self.num_read_ahead += 1
        return True

    def cancel_refill(self, record: StorageRecord) -> None:
        """Free the memory of a storage that is being filled. Its copy stays."""
        content, storage = record.emptied, record.storage()
        if content is None or content.transfer is None or storage is None:
            return
        self._wait_for_refill(content)
        resize_storage(storage, 0)
        self._ledger.resize(record, storage, 0)

    def refill(self, record: StorageRecord) -> None:
        """Bring an emptied storage back.

        Raises:
            TierIOError: Its copy cannot be read. It stays, because the disk may work again at the next attempt.
        """
        content, storage = record.emptied, record.storage()
        assert content is not None
        assert storage is not None
        has_memory = content.transfer is not None
        if not has_memory or not self._wait_for_refill(content):
            if not has_memory:
                resize_storage(storage, content.size_bytes)
            try:
                self._transfers.read(content.copy, storage)
            except BaseException as error:
                resize_storage(storage, 0)
                if has_memory:
                    self._ledger.resize(record, storage, 0)
                if not isinstance(error, TierError):
                    raise
                msg = (
                    f"a parameter, gradient or optimizer state of {content.size_bytes} bytes cannot be brought back: "
                    f"{error}"
                )
                raise TierIOError(msg) from error
        self.spares[record.id] = record
        self._ledger.refilled(record, storage)

    def _wait_for_refill(self, content: Emptied) -> bool:
        """Wait for the read that fills a storage. Return whether it did."""
        assert content.transfer is not None
        try:
            self._transfers.counters.stall_s += content.transfer.wait()
        except TierError:
            content.transfer = None
            return False
        content.transfer = None  # not in a `finally`: after a KeyboardInterrupt the read is still in progress
        return True

    # -- spares that end

    def finish_spare(self, record: StorageRecord) -> None:
        """Wait until nothing reads a storage any more: it is about to be written."""
        spare = record.spare
        if spare is not None and spare.copy.transfer is not None and not self._transfers.arrive(spare.copy):
            record.spare = None

    def finish_spares(self) -> None:
        """Wait until no spare is being made any more."""
        for record in self.spares.values():
            self.finish_spare(record)

    def spoil(self, record: StorageRecord) -> None:
        """Forget the spare of a storage that may be written without the recorder seeing that."""
        if record.spare is not None:
            self.finish_spare(record)
            record.spare = None

    def spoil_all(self) -> None:
        """Forget all spares."""
        for record in self.spares.values():
            self.spoil(record)
        self.spares.clear()

    def forget_the_dead(self) -> None:
        """Forget the records that have no spare any more, and those that are not emptied any more."""
        self.spares = {key: record for key, record in self.spares.items() if record.spare is not None}
        self.emptied = {key: record for key, record in self.emptied.items() if record.emptied is not None}
