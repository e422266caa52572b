"""Evicts persistent tensors: parameters, gradients and optimizer states that no op is reading.

[Note: emptied in place]
The program holds these tensors, so freeing their memory has to leave them intact. The storage is copied to the tier and
then resized to 0 bytes. Every alias of it stays valid, and sees the content again once the storage has its size back
and is read from the tier. Reading an alias in between would crash the process. So

- every op of the thread brings its arguments back first (record/recorder.py), and they stay for its duration;
- in backward, where the recorder is off between nodes, gradients that the engine is about to accumulate into are
  brought back after the node before, and Python code brings its arguments back (record/gap_reads.py); saved tensors
  are brought back when they are unpacked, and stay until their node ends;
- the methods by which a program reaches memory without an op are patched (record/readers.py). Where they give it an
  address that may outlive the call, the tensor stays from then on;
- a storage never leaves if the program holds its Python object, or if something outside of torch shares its memory. Nor
  does that of a gradient if another tensor shares it, because the engine may be about to read that tensor;
- reads by other threads are not seen. Nothing leaves while torch.distributed is in use.

A storage that was only read since it came back has a valid copy (`StorageRecord.spare`), and leaves without a transfer.
Some writes are not ops (the engine's accumulation, hooks). They invalidate the copy, but are looked for only if
something is away now or was in the last step. So after a step in which nothing left, all these copies are given up.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.storages import resize_storage, storage_num_holders
from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.memory.in_use import InUse, arguments_in, is_object_held
from torchdelta.runtime.memory.use_order import UseOrder
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.copies import Emptied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.copies import TierCopy
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.persistent import Persistent
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["Persistents"]

# Smaller tensors stay: the overhead outweighs the bytes freed.
_LEAST_BYTES = 4096
_STAYS = Stays.RESIZED | Stays.IN_FLIGHT | Stays.OTHER_STREAM | Stays.NOT_OURS


class Persistents:
    """Evicts persistent tensors, and brings them back.

    Args:
        ledger: The ledger.
        transfers: Copies storages to the tier and back.
        steps: The position in the training step.
        find: Returns the persistent tensors, given the addresses of those in use; with True, it also looks for new
            parameters and optimizers.
    """

    def __init__(
        self,
        ledger: Ledger,
        transfers: Transfers,
        steps: StepTracker,
        find: Callable[[bool, set[int]], Iterable[Persistent]],
    ) -> None:
        self.ledger = ledger
        self.transfers = transfers
        self.make: Callable[[int, str], None] = _make_nothing  # of the room that uses this
        self.piece_bytes = sys.maxsize  # see [Note: lists in pieces]; of the room, too
        self.is_open = True  # whether anything may leave
        self.has_found = False  # whether any tensor that may leave is known; False until an op reads a parameter
        self.is_active = False  # whether anything has left in this step or the last
        self.num_emptied = 0  # over the whole session
        self._steps = steps
        self._find = find
        self._known: dict[int, Persistent] = {}  # by the id of the record
        self._order = UseOrder()
        self.in_use = InUse(ledger)
        self._lent: set[int] | None = None  # see `lend`
        self._emptied: dict[int, StorageRecord] = {}  # those that have left, and some that are back
        self._refilled: dict[int, StorageRecord] = {}  # those that may have a spare copy
        self._compiled: list[bool] = []  # for each compiled function that runs, whether it may read optimizer states
        self.num_copying = 0  # calls of torch that read raw memory, but pass no address on
        self._step = 0
        self._num_before = 0  # `num_emptied` when the step began
        self._searched_in = -1  # the step in which `find` looked for new parameters

    # -- what must be here

    def begin(self, *arguments: Any, may_write: bool = False) -> None:
        """Bring back the tensors among an op's arguments, in lists and dicts too. They stay until `end`.

        `may_write`: the op may write them without the recorder seeing that.
        """
        self.in_use.begin(arguments)
        if self.is_active:
            try:
                self.bring(arguments_in(arguments), may_write=may_write)
            except BaseException:
                self.in_use.end()
                raise

    def end(self) -> None:
        """The op that began last has ended."""
        self.in_use.end()

    def bring(self, tensors: Iterable[torch.Tensor], *, may_write: bool = False) -> None:
        """Bring tensors back.

        Args:
            tensors: What is about to be read.
            may_write: Whether it may be written without the recorder seeing that.
        """
        if self._steps.num_steps != self._step:
            self._on_step()
        missing: list[StorageRecord] = []
        for record in self.in_use.records(tensors):
            known = self._known.get(record.id)
            if known is not None:
                self._order.use(known.key)
            if may_write:
                record.spare = None
            if record.emptied is not None and record not in missing:
                missing.append(record)
        if missing:
            self._bring(missing)
            if may_write:
                for record in missing:
                    record.spare = None

    def bring_record(self, record: StorageRecord) -> None:
        """Bring a storage back that a replay or an unpack reads, and let it stay for the rest of that."""
        known = self._known.get(record.id)
        if known is not None:
            self._order.use(known.key)
        self._bring([record])

    def _bring(self, missing: list[StorageRecord]) -> None:
        size_bytes = sum(record.emptied.size_bytes for record in missing if record.emptied is not None)
        self.in_use.begin([storage for record in missing if (storage := record.storage()) is not None])
        try:
            self.make(size_bytes, "bringing back parameters, gradients or optimizer states")
            for record in missing:
                if record.emptied is not None:
                    self._refill(record)
        finally:
            self.in_use.end()

    def bring_all(self) -> None:
        """Bring everything back, whatever the budget."""
        if self.ledger.num_emptied:
            for record in list(self.ledger.records.values()):
                if record.emptied is not None:
                    self._refill(record)

    def close(self) -> None:
        """Bring everything back: the scope ends. Nothing leaves any more."""
        self.is_open = self.is_active = False
        self.bring_all()

    def _refill(self, record: StorageRecord) -> None:
        content, storage = record.emptied, record.storage()
        assert content is not None
        assert storage is not None
        resize_storage(storage, content.size_bytes)
        try:
            self.transfers.read(content.copy, storage)
        except BaseException as error:
            resize_storage(storage, 0)
            if not isinstance(error, TierError):
                raise
            msg = (
                f"a parameter, gradient or optimizer state of {content.size_bytes} bytes cannot be brought back: "
                f"{error}"
            )
            raise TierIOError(msg) from error  # the copy stays: the disk may work again at the next attempt
        self._refilled[record.id] = record
        self.ledger.refilled(record, storage)

    # -- what stays

    def lock(self, tensors: Iterable[torch.Tensor], *, may_write: bool = False) -> None:
        """Bring tensors back that unrecorded code is about to read. In backward they stay until `in_use.unlock`."""
        found = list(tensors)
        self.in_use.lock(found)
        if self.is_active:
            self.in_use.begin(found)
            try:
                self.bring(found, may_write=may_write)
            finally:
                self.in_use.end()

    def begin_raw(self, things: Iterable[Any]) -> None:
        """Bring back tensors or storages whose memory is about to be read without an op, until `end`."""
        found = list(things)
        records = list(self.in_use.records(found))
        self.in_use.begin(found)
        try:
            for record in records:
                record.spare = None
                if record.emptied is not None:
                    self.bring_record(record)
                record.spare = None
        except BaseException:
            self.in_use.end()
            raise

    def export(self, things: Iterable[Any]) -> None:
        """Something outside of torch is given the address of tensors or storages: they stay from now on."""
        found = list(things)
        for thing in found:
            if isinstance(thing, torch.Tensor) and thing.device == self.ledger.device:
                self.ledger.know_inner(thing)
        self.begin_raw(found)
        for record in self.in_use.records(found):
            record.is_exported = True
        self.end()

    def begin_compiled(self, *, with_states: bool) -> None:
        """Bring back what compiled code may read, and let it stay until `end_compiled`. See [Note: compiled code].

        `with_states`: It may read optimizer states, too.
        """
        is_here = any(self._compiled) or (bool(self._compiled) and not with_states)  # for an outer call
        self._compiled.append(with_states)
        try:
            if not is_here:
                self._bring_for_compiled()
        except BaseException:
            self.end_compiled()
            raise

    def let_compiled_read_states(self) -> None:
        """Bring optimizer states back if compiled code runs: an optimizer steps in there."""
        if self._compiled:
            self._compiled[-1] = True
            self._bring_for_compiled()

    def end_compiled(self) -> None:
        """End what `begin_compiled` began last."""
        had_states = any(self._compiled)
        self._compiled.pop()
        for key, record in list(self._refilled.items()):
            known = self._known.get(key)
            if had_states or known is None or not known.is_state:
                record.spare = None  # it may have been written
                del self._refilled[key]

    def _bring_for_compiled(self) -> None:
        if self._emptied and not all(self._compiled):
            self._search(is_thorough=False)  # a state may have become a parameter's data
        self._emptied = {key: record for key, record in self._emptied.items() if record.emptied is not None}
        missing = [record for key, record in self._emptied.items() if self._may_be_read(self._known.get(key))]
        if missing:
            self._bring(missing)

    def _may_be_read(self, known: Persistent | None) -> bool:
        """Return whether compiled code that runs may read a tensor; None: it is not known what it is."""
        return bool(self._compiled) and (any(self._compiled) or known is None or not known.is_state)

    @property
    def is_lent(self) -> bool:
        """Whether a call of torch runs that holds storage objects but reads them one at a time."""
        return self._lent is not None

    def lend(self) -> None:
        """Begin a call of torch that holds storage objects but reads them one at a time, as `torch.save`."""
        self._lent = {known.record.id for known in self._known.values() if not is_object_held(known.record)}
        self._lent.update(record.id for record in self.ledger.records.values() if record.emptied is not None)

    def take_back(self) -> None:
        """End what `lend` began."""
        self._lent = None

    # -- evictions

    def evict(self, target_bytes: int) -> None:
        """Evict tensors, those first that are needed last, until no more than `target_bytes` live."""
        if not self.is_open or self.ledger.surveys:
            return
        if self._steps.num_steps != self._step:
            self._on_step()
        usage = self.ledger.usage
        for attempt in range(3):
            if attempt or not self._known or self._compiled:
                if attempt == 2 and self._searched_in == self._step:
                    return
                self._search(is_thorough=attempt == 2)
            locked = self.in_use.addresses()
            ranked = sorted(self._known.values(), key=lambda known: self._order.next_use(known.key), reverse=True)
            while usage.live_bytes > target_bytes:
                leaving = self._choose(ranked, usage.live_bytes - target_bytes, locked)
                if not leaving:
                    break
                if not self._empty(leaving):
                    return
            if usage.live_bytes <= target_bytes:
                return

    def _search(self, *, is_thorough: bool) -> None:
        if is_thorough:
            self._searched_in = self._step
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._known.clear()  # its C++ reads and writes them at any time
            self.has_found = True
            return
        self._known = {known.record.id: known for known in self._find(is_thorough, self.in_use.addresses())}
        self.has_found |= bool(self._known)

    def _choose(self, ranked: list[Persistent], needed_bytes: int, locked: set[int]) -> list[StorageRecord]:
        """Take tensors from the front of `ranked`, until they are enough."""
        chosen: list[StorageRecord] = []
        num_seen = 0
        for known in ranked:
            if needed_bytes <= 0:
                break
            num_seen += 1
            if known.record.address not in locked and not self._may_be_read(known) and self._may_leave(known):
                chosen.append(known.record)
                needed_bytes -= known.record.size_bytes
        del ranked[:num_seen]
        return chosen

    def _may_leave(self, known: Persistent) -> bool:
        record = known.record
        if record.emptied is not None or record.size_bytes < _LEAST_BYTES or record.is_exported or record.is_resizable:
            return False
        if self.ledger.records.get(record.address) is not record:
            return False
        current = record.current
        if current is not None and current.stays & _STAYS:
            return False
        if self._lent is None:
            if is_object_held(record):
                return False
        elif record.id not in self._lent:
            return False
        storage = record.storage()
        if storage is None or not storage.resizable() or storage.device != self.ledger.device:
            return False
        if storage.nbytes() != record.size_bytes or (storage.device.type == "cpu" and storage.is_shared()):
            return False
        if known.is_gradient:
            num_own = 2 + (current is not None and current.strong is not None)  # its `.grad`, and the storage's object
            return storage_num_holders(record.address) <= num_own
        return True

    def _empty(self, records: list[StorageRecord]) -> bool:
        """Empty storages in place. Return whether all could be copied."""
        copies: list[tuple[StorageRecord, TierCopy | None]] = []
        for record in records:
            spare = record.spare
            if spare is not None and spare.content is not None and spare.content is record.current:
                copies.append((record, spare.copy))
            else:
                storage = record.storage()
                assert storage is not None
                record.spare = None
                copies.append((record, self.transfers.start_copy(storage)))
        is_complete = True
        for record, copy in copies:
            if copy is None or not self.transfers.arrive(copy):
                is_complete = False
                continue
            storage = record.storage()
            assert storage is not None
            content = Emptied(copy, record.size_bytes, record.current)
            resize_storage(storage, 0)
            self._emptied[record.id] = record
            self.ledger.emptied(record, storage, content)
            self.num_emptied += 1
        self.is_active = True
        return is_complete

    def _on_step(self) -> None:
        """Notice that a step has ended."""
        self._step = self._steps.num_steps
        was_active = self.is_active
        self.is_active = self.ledger.num_emptied > 0 or self.num_emptied > self._num_before
        if was_active and not self.is_active:
            # From here on nothing shows what the engine adds to a gradient.
            for record in self._refilled.values():
                record.spare = None
            self._refilled.clear()
        self._num_before = self.num_emptied
        self._order.end_step()


def _make_nothing(size_bytes: int, why: str) -> None:
    del size_bytes, why
