"""Moves the content of storages to the tier and back, in place: their memory is freed, and later allocated again.

A *spare* copy is a copy of a storage that still has its content. As long as the storage is only read, it can be emptied
without a transfer. A spare is left where a storage was refilled, or made in the background before the memory is needed.

[Note: mapped back]
When a scope ends, and while a survey runs, the program may read everything, and no op before brings it back. But all of
it may be more than the machine's memory. So what does not fit into the budget is mapped (mmap, private): the storage
gets its copy in the swap file as its memory. The kernel reads a page when it is touched, and takes clean pages away
again when memory is short; a page that is written becomes memory of the process. The storage can be resized and emptied
as before. The copy keeps its place in the file as long as it is mapped, and the unnamed file lives until its last
mapping has died. Forks change that: see [Note: mappings and forks] in tiers/mapped.py. What a survey has brought back
is emptied again when it ends. In a new scope, a mapped storage counts with all of its bytes: an op may write all of it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import resize_storage
from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.runtime.state.copies import Emptied
from torchdelta.runtime.state.kinds import byte_alias

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.copies import TierCopy
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Emptying"]

_logger = logging.getLogger("torchdelta")

# Smaller storages are read into memory: Linux limits the number of mappings of a process (vm.max_map_count).
_LEAST_MAPPED_BYTES: Final = 1 << 16


class Emptying:
    """Empties storages in place and refills them. Which ones, others decide."""

    def __init__(self, ledger: Ledger, transfers: Transfers) -> None:
        self.num_emptied = 0  # over the whole session
        self.num_read_ahead = 0  # refills that were started before their use
        self.spares: dict[int, StorageRecord] = {}  # records that may have a spare, by id
        self.emptied: dict[int, StorageRecord] = {}  # records that are emptied, and some that are back, by id
        self._ledger = ledger
        self._transfers = transfers

    @property
    def away_bytes(self) -> int:
        """The bytes of the storages that have no memory now."""
        contents = [record.emptied for record in self.emptied.values() if not record.size_bytes]
        return sum(content.size_bytes for content in contents if content is not None)

    # -- out

    def has_spare(self, record: StorageRecord) -> bool:
        """Return whether a storage has a spare copy of what it holds now, perhaps one that is still being made."""
        spare = record.spare
        return spare is not None and spare.content is not None and spare.content is record.current

    def is_clean(self, record: StorageRecord) -> bool:
        """Return whether a storage can be emptied without waiting for a transfer."""
        return self.has_spare(record) and record.spare is not None and record.spare.copy.is_there()

    def make_spare(self, record: StorageRecord, *, begins_content: bool = False) -> bool:
        """Start making a spare copy. Return whether that was possible.

        Only a content that the recorder knows can have one: otherwise nothing would show that it was overwritten.

        Args:
            record: Of the storage.
            begins_content: If the recorder does not know the content, let it know it from now on. For gradients: the
                engine made them, and what it adds to them later is looked for.
        """
        storage = record.storage()
        if storage is None or (record.current is None and not begins_content):
            return False
        copy = self._transfers.start_copy(storage)
        if copy is None:
            return False
        copy.source = None  # the program may free the storage before the record knows that the copy has ended
        self.spoil(record)
        record.spare = Emptied(copy, record.size_bytes, self._ledger.know_content(record))
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
                if storage is None:  # garbage was collected since it was chosen
                    continue
                self.spoil(record)
                copies.append((record, self._transfers.start_copy(storage)))
        is_complete = True
        for record, copy in copies:
            if copy is None or not self._transfers.arrive(copy):
                record.spare = None
                is_complete = False
                continue
            storage = record.storage()
            if storage is None:
                record.spare = None
                continue
            content = Emptied(copy, record.size_bytes, record.current)
            resize_storage(storage, 0)
            self.emptied[record.id] = record
            self._ledger.emptied(record, storage, content)
            self.num_emptied += 1
        return is_complete

    # -- back

    def start_refill(self, record: StorageRecord) -> bool:
        """Allocate the memory of an emptied storage and start filling it. Return whether that was possible."""
        if record.emptied is None or record.storage() is None:  # it has died since
            return False
        try:
            self._start_read(record)
        except (RuntimeError, TierError) as error:
            if isinstance(error, TierError) or is_out_of_memory(error):
                return False  # its use tries again, and raises if that fails, too
            raise
        self.num_read_ahead += 1
        return True

    def cancel_refill(self, record: StorageRecord) -> None:
        """Free the memory of a storage that is being filled. Its copy stays."""
        content = record.emptied
        if content is not None and record.size_bytes:
            if content.transfer is not None:
                with contextlib.suppress(TierError):
                    self._end_read(content)
            self._free(record)

    def refill(self, record: StorageRecord) -> None:
        """Bring an emptied storage back.

        Raises:
            TierIOError: Its copy cannot be read. It stays, because the disk may work again at the next attempt.
        """
        content, storage = record.emptied, record.storage()
        assert content is not None
        assert storage is not None
        try:
            if content.transfer is not None:  # read ahead; what failed then is tried again
                with contextlib.suppress(TierError):
                    self._end_read(content)
            if not content.is_read:
                self._start_read(record)
                self._end_read(content)
        except TierError as error:
            self._free(record)
            msg = (
                f"a parameter, gradient or optimizer state of {content.size_bytes} bytes cannot be brought back: "
                f"{error}"
            )
            raise TierIOError(msg) from error
        self.spares[record.id] = record
        self._ledger.refilled(record, storage)

    def refill_all(self, room_bytes: float) -> list[StorageRecord]:
        """Bring all emptied storages back: see `Persistents.bring_all`."""
        failure: Exception | None = None
        brought: list[StorageRecord] = []
        for record in list(self._ledger.records.values()) if self._ledger.num_emptied else ():
            content = record.emptied
            if content is None:
                continue
            needed_bytes = content.size_bytes - record.size_bytes  # none for what is being read already
            try:
                if needed_bytes <= room_bytes or not self.map_back(record):
                    self.refill(record)
                    room_bytes -= needed_bytes
                brought.append(record)
            except Exception as error:  # noqa: BLE001 - it is raised when all others are back
                failure = failure or error
        if failure is not None:
            raise failure
        return brought

    def map_back(self, record: StorageRecord) -> bool:
        """Give an emptied storage its content as a mapping of its copy. Return whether that was possible.

        See [Note: mapped back].
        """
        content, storage = record.emptied, record.storage()
        if content is None or storage is None or record.size_bytes or not self.map_copy(content, storage):
            return False
        content.is_read = True
        self.spares[record.id] = record
        self._ledger.refilled(record, storage)
        return True

    def map_copy(self, content: Emptied, storage: torch.UntypedStorage) -> bool:
        """Give an empty storage the content of a copy as a mapping. Return whether that was possible."""
        if content.size_bytes < _LEAST_MAPPED_BYTES:
            return False
        try:
            return content.copy.tier.map_into(content.copy.slot, storage, content.copy)
        except (TierError, OSError, RuntimeError):
            return False  # the caller reads the copy, which may work, or raises an error that names the reason

    def empty_again(self, record: StorageRecord) -> None:
        """Empty a storage that a survey has brought back, unless it may have been written since.

        Recorded ops write no real tensor in a survey, and every read or write of raw memory calls `spoil`. So a spare
        that is still there is the content, even if the recorder does not know it. This undoes what
        other code has added to a gradient in the survey.
        """
        content, storage = record.spare, record.storage()
        if content is None or storage is None or record.emptied is not None:
            return
        if storage.nbytes() == content.size_bytes:
            resize_storage(storage, 0)
            content.is_read = False
            self.emptied[record.id] = record
            self._ledger.emptied(record, storage, content)

    def refill_or_lose(self, record: StorageRecord) -> None:
        """Try once more to bring an emptied storage back. If its copy cannot be read, its bytes are 0xFF, which is NaN.

        So the program can read it without a crash. If the device has no memory for it, it stays empty.
        """
        content, storage = record.emptied, record.storage()
        if content is None or storage is None or self.map_back(record):
            return
        with contextlib.suppress(TierError, RuntimeError):
            self.refill(record)
            return
        with contextlib.suppress(RuntimeError), Quietly():
            resize_storage(storage, content.size_bytes)
            byte_alias(storage).fill_(0xFF)
            self._ledger.refilled(record, storage)
            record.spare = None
            # The error that is raised names one tensor only; after a second Ctrl-C, it names none.
            _logger.error(
                "a parameter, gradient or optimizer state of %d bytes is lost and holds NaN: its copy cannot be read",
                content.size_bytes,
            )

    def _start_read(self, record: StorageRecord) -> None:
        """Allocate memory for an emptied storage, if it has none, and start to read its content."""
        content, storage = record.emptied, record.storage()
        assert content is not None
        assert storage is not None
        if not record.size_bytes:
            resize_storage(storage, content.size_bytes)
            self._ledger.resize(record, storage, content.size_bytes)
        content.is_read = False
        try:
            content.transfer = content.copy.tier.read(content.copy.slot, storage)
        except TierError:
            self._free(record)
            raise
        self._transfers.counters.swapped_in_bytes += content.size_bytes

    def _end_read(self, content: Emptied) -> None:
        """Wait for the read that fills a storage. After an interrupt of this wait, the read still goes on."""
        assert content.transfer is not None
        try:
            self._transfers.counters.stall_s += content.transfer.wait()
        except TierError:
            content.transfer = None
            raise
        content.transfer = None
        content.is_read = True

    def _free(self, record: StorageRecord) -> None:
        """Free the memory of an emptied storage that no transfer fills any more."""
        content, storage = record.emptied, record.storage()
        if content is not None and storage is not None and record.size_bytes:
            content.is_read = False
            resize_storage(storage, 0)
            self._ledger.resize(record, storage, 0)

    # -- spares that end

    def finish_spare(self, record: StorageRecord) -> None:
        """Wait until the spare of a storage is there, if one is being made."""
        spare = record.spare
        if spare is not None and spare.copy.transfer is not None and not self._transfers.arrive(spare.copy):
            record.spare = None

    def finish_spares(self) -> None:
        """Wait until no spare is being made any more."""
        for record in self.spares.values():
            self.finish_spare(record)

    def spoil(self, record: StorageRecord) -> None:
        """Give up the spare of a storage. Cancel a copy that has not begun; wait for one that has."""
        spare, record.spare = record.spare, None
        if spare is None or spare.copy.transfer is None:
            return
        transfer = spare.copy.transfer
        del spare  # releases its slot, so that a copy which has not begun is skipped
        with contextlib.suppress(TierError):
            self._transfers.counters.stall_s += transfer.wait()

    def spoil_all(self) -> None:
        """Give up all spares."""
        for record in self.spares.values():
            self.spoil(record)
        self.spares.clear()

    def prune(self) -> None:
        """Forget the records that have no spare any more, and those that are not emptied any more."""
        self.spares = {key: record for key, record in self.spares.items() if record.spare is not None}
        self.emptied = {key: record for key, record in self.emptied.items() if record.emptied is not None}
