"""Which buffer each storage holds now, and where the content of every other buffer is."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Final

import torch

from torchdelta._torch.modes import NoDispatch, NoFunction
from torchdelta._torch.storages import address_of, storage_address, storage_behind, storage_num_holders
from torchdelta._torch.tensors import (
    counted_version_of,
    is_leaf,
    is_trained_leaf,
    is_trained_leaf_or_view,
    is_zerotensor,
)
from torchdelta.runtime.state.buffer import Buffer, Residence, Stays, View
from torchdelta.runtime.state.kinds import byte_alias, runs_own_ops
from torchdelta.runtime.state.outside_memory import is_outside_memory
from torchdelta.runtime.state.storages import Storages

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import OpEntry, StorageRecord
    from torchdelta.runtime.state.copies import Fetch, TierCopy
    from torchdelta.runtime.state.journal import Journal
    from torchdelta.runtime.state.observer import Observing

__all__ = ["UNKNOWN_VERSION", "WRAPPED_NUMBER_BYTES", "Contents", "is_same_number"]

WRAPPED_NUMBER_BYTES = 16
# The witness's version is not known yet: the op that writes it still runs, and autograd counts its write afterwards.
UNKNOWN_VERSION: Final = -1
_DROPPED: Final = Residence.DROPPED
_GONE: Final = Residence.GONE


class Contents(Storages):
    """The contents of all known storages: the part of the ledger that moves buffers."""

    def __init__(self, device: torch.device | str, observing: Observing) -> None:
        super().__init__(device, observing)
        self.held: dict[int, Buffer] = {}  # buffers that the runtime keeps alive: the candidates for eviction
        self.clock = 0  # number of ops so far; the unit of staleness
        self.has_resizable = False  # whether any storage was ever resized to 0 and filled again
        self.has_outside = False  # whether an op has read memory that code outside of torch may write
        self.late_bytes = 0  # of parameters that the scan did not find (see scan.py)
        self.num_lost = 0  # contents that were overwritten while recorded ops read them: see `is_replayable`
        self.num_vacated = 0  # contents that lost their storage or copy: replays reach further up since
        self._journal: Journal | None = None  # of the survey that is running

    def _vacate(self, record: StorageRecord) -> None:
        """Record that a storage no longer holds its buffer."""
        buffer, record.current = record.current, None
        if buffer is not None and buffer.record is record:
            self._note(buffer)
            if buffer.op is not None:
                self.num_vacated += 1
            buffer.record = None
            if buffer.copy is None and buffer.fetching is None:
                buffer.move(_DROPPED if buffer.op is not None else _GONE)
            else:
                buffer.move(buffer.residence_without_storage)

    def buffer_of(self, tensor: torch.Tensor) -> Buffer:
        """Return the buffer that a tensor's storage holds now. A storage of unknown origin gets one without an op."""
        storage = storage_behind(tensor)
        record = self.records.get(address_of(storage))
        if record is None and (tensor.__class__ is torch.nn.Parameter or is_trained_leaf(tensor)):
            self.late_bytes += storage.nbytes()
        if record is None or record.reference is None:
            record = self.know(storage)
        buffer = record.current
        if buffer is None:
            buffer = self.know_content(record)
            if is_trained_leaf(tensor):
                buffer.stays |= Stays.LEAF
        return buffer

    def know_content(self, record: StorageRecord) -> Buffer:
        """Return the buffer that a storage holds now. A content of unknown origin gets one without an op."""
        return record.current or self._begin_content(record, None, "", 0)

    def view_of(self, tensor: torch.Tensor) -> View:
        """Return the view of a tensor on its buffer, for the tape.

        A buffer without an op is held from now on (see [Note: the invariant]).
        """
        buffer = self.buffer_of(tensor)
        buffer.last_used = self.clock
        view = View(buffer, tensor)
        if buffer.witness_version == UNKNOWN_VERSION and buffer.strong is not None:
            self._note(buffer)
            with NoDispatch(), NoFunction():
                self._hold_by(buffer, buffer.strong, self._witness_of(buffer, tensor, buffer.strong))
        if buffer.op is None and buffer.strong is None and buffer.copy is None:
            self.hold(buffer, tensor)
            if tensor.__class__ is torch.nn.Parameter or is_trained_leaf_or_view(tensor):
                buffer.stays |= Stays.LEAF
        record = buffer.record
        if record is not None and record.is_outside is None:
            record.is_outside = is_outside_memory(tensor)
            self.has_outside = self.has_outside or record.is_outside
        if record is not None and record.is_outside and buffer.op is not None:
            self.cannot_replay(buffer)
        if is_zerotensor(tensor):  # zeros without memory (forward-mode derivatives): nothing to rebuild them on
            buffer.stays |= Stays.NOT_OURS
            view.tensor = buffer.strong
        elif not view.shape and buffer.op is None and buffer.size_bytes <= WRAPPED_NUMBER_BYTES:
            held = buffer.witness if buffer.witness is not None else buffer.strong
            if held is not None and is_same_number(held, view):  # else it is another element, or the whole of a vector
                view.tensor = held
        return view

    def made(self, tensor: torch.Tensor, entry: OpEntry | None, origin: str, index: int) -> int:
        """Give an op's output its buffer.

        Returns:
            The bytes of its storage; 0 if the storage was known before (the output is a view) or does not exist.
        """
        try:
            storage = storage_behind(tensor)
        except RuntimeError:  # it has none
            return 0
        record = self.records.get(address_of(storage))
        if record is None or record.reference is None:
            record = self.know(storage)
            if record.is_fake and record.size_bytes and tensor.device not in self.counted_devices:
                self.resize(record, storage, 0)  # a survey's tensor that stands for one on another device
        if record.current is not None:
            return 0
        self._begin_content(record, entry, origin, index)
        return record.size_bytes

    def invalidate(self, record: StorageRecord) -> Buffer | None:
        """End a storage's content, because an op overwrites it or may do so. Return the buffer that it held."""
        buffer = record.current
        if buffer is None:
            return None
        self.release(buffer)
        self._vacate(record)
        if buffer.op is None and buffer.copy is None and buffer.num_views:
            self.num_lost += 1
        return buffer

    def written(
        self, tensor: torch.Tensor, old: Buffer | None, entry: OpEntry | None, origin: str, index: int
    ) -> Buffer:
        """Give a storage that an op has written its new buffer. `old` is what `invalidate` returned."""
        storage = storage_behind(tensor)
        record = self.records.get(address_of(storage))
        if record is None or record.reference is None:
            record = self.know(storage)
        size_bytes = storage.nbytes() if storage.device in self.counted_devices else 0
        if size_bytes != record.size_bytes:
            self.resize(record, storage, size_bytes)
        buffer = self._begin_content(record, entry, origin, index)
        if tensor.requires_grad and is_trained_leaf(tensor):
            buffer.stays |= Stays.LEAF
        if old is not None:
            buffer.stays |= old.stays & Stays.LEAF  # a leaf's storage, seen through `leaf.data`
        if old is not None and old.num_saved:
            self.succeed(old, buffer, tensor)
        return buffer

    def exchanged(self, tensor: torch.Tensor, origin: str, *, counts_only: bool) -> None:
        """Know the storage that an op has given to a tensor. No content changes, nor that of the storage it had."""
        if counts_only:
            self.know_by_tensor(tensor)
            return
        self.made(tensor, None, origin, 0)
        record = self.find(tensor)
        if record is not None and record.current is not None and tensor.requires_grad and is_trained_leaf(tensor):
            record.current.stays |= Stays.LEAF

    def succeed(self, old: Buffer, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Move the handles of a buffer on to the next content of its storage.

        Unpack decides by the version whether that write is an error. See [Note: a saved tensor follows its storage].
        """
        self._note(old)
        old.successor = buffer
        buffer.num_saved, buffer.has_left = old.num_saved, old.has_left
        buffer.save_order = old.save_order
        self.hold(buffer, tensor)
        buffer.witness_version = UNKNOWN_VERSION  # until an op reads this content

    def reinstate(self, record: StorageRecord, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Undo `invalidate`, unless that was done already: the storage was not written after all."""
        if record.current is not None:
            return
        self.release(buffer)  # the copy that was made in between
        if buffer.record is not None:  # else the copy's storage has died with its last holder
            self._vacate(buffer.record)
        record.current, buffer.record = buffer, record
        buffer.move(Residence.RESIDENT)
        if is_trained_leaf(tensor):
            buffer.stays |= Stays.LEAF  # its copy did without
        if buffer.num_saved or (buffer.op is None and buffer.num_views):
            self.hold(buffer, tensor)

    def _begin_content(self, record: StorageRecord, entry: OpEntry | None, origin: str, index: int) -> Buffer:
        """Put a new buffer into a storage."""
        size_bytes = record.size_bytes if record.emptied is None else record.emptied.size_bytes
        buffer = Buffer(size_bytes, record, entry, origin, index, self.clock)
        if record.is_resizable:
            buffer.stays |= Stays.RESIZED
        if record.is_unaligned:
            buffer.stays |= Stays.NOT_OURS
        record.current = buffer
        if entry is not None:
            entry.outputs.append(weakref.ref(buffer))
        return buffer

    def hold(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Hold a buffer's storage through an alias, and choose its witness of unrecorded writes."""
        self._note(buffer)
        with NoDispatch(), NoFunction():
            # A tensor that runs its own ops is a fake tensor of a survey.
            alias = byte_alias(storage_behind(tensor)) if runs_own_ops(tensor.__class__) else tensor.detach()
            self._hold_by(buffer, alias, self._witness_of(buffer, tensor, alias))

    @staticmethod
    def _witness_of(buffer: Buffer, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose version shows unrecorded writes to a buffer: the one that is used, or our alias.

        The alias is made below autograd and has a version counter of its own: only the program's own tensor shows a
        write outside of the scope. It also keeps the storage from leaving.
        """
        is_own = buffer.op is None and not runs_own_ops(tensor.__class__) and is_leaf(tensor)
        return tensor if is_own else alias

    def _hold_by(self, buffer: Buffer, alias: torch.Tensor, witness: torch.Tensor) -> None:
        has_version = not witness.is_inference()
        buffer.strong = alias
        buffer.witness = witness if has_version else None
        buffer.witness_version = counted_version_of(witness) if has_version else 0
        buffer.witness_address = storage_address(witness) if has_version else 0
        buffer.releaser = self
        self.held[id(buffer)] = buffer

    def watch(self, buffer: Buffer, witness: torch.Tensor, version: int) -> None:
        """Use another tensor's version to detect unrecorded writes."""
        self._note(buffer)
        buffer.witness, buffer.witness_version = witness, version
        buffer.witness_address = storage_address(witness)

    def exchange_witnesses(self, t1: torch.Tensor, t2: torch.Tensor) -> None:
        """Follow the version counters of two tensors that `torch.utils.swap_tensors` has exchanged."""
        for buffer in list(self.held.values()):
            if buffer.witness is t1:
                buffer.witness = t2
            elif buffer.witness is t2:
                buffer.witness = t1

    def release(self, buffer: Buffer) -> None:
        """Stop holding a buffer's storage."""
        if buffer.strong is None:
            return
        self._note(buffer)
        journal, record = self._journal, buffer.record
        is_held = journal is not None and journal.holds(buffer, buffer.strong)
        if buffer.residence is Residence.LEAVING:
            buffer.move(Residence.RESIDENT)  # until its storage dies, possibly below
        buffer.releaser = None
        buffer.strong = None
        buffer.witness = None
        self.held.pop(id(buffer), None)
        if journal is not None and is_held and record is not None:
            self._suspend(journal, record)

    def brought_back(self, buffer: Buffer, storage: torch.UntypedStorage, *, held: bool = False) -> None:
        """Record that a storage holds a buffer's content again. Hold it if it is saved, or if `held` is true."""
        self._note(buffer)
        record = self.know(storage)
        if record.current is not buffer:
            self._vacate(record)
        record.current = buffer
        buffer.record = record
        buffer.last_used = self.clock
        buffer.move(Residence.RESIDENT)
        self.observing.observer.on_return(buffer, record)
        if held:
            buffer.stays &= ~Stays.LEAF  # the copy of what a leaf held before a write is not the leaf's storage
        if (held or buffer.num_saved) and buffer.strong is None:
            alias = byte_alias(storage)
            self._hold_by(buffer, alias, alias)

    def dropped(self, size_bytes: int, entry: OpEntry, origin: str, index: int) -> Buffer:
        """Return the buffer of a content that an op, recorded elsewhere, has made, and that is in no storage."""
        buffer = Buffer(size_bytes, None, entry, origin, index, self.clock)
        self._note(buffer)
        buffer.move(_DROPPED)
        return buffer

    # -- copies on a tier

    def copied(self, buffer: Buffer, copy: TierCopy) -> None:
        """Record that a buffer has a copy on a tier, which may still be in progress."""
        self._note(buffer)
        buffer.copy = copy
        if buffer.residence is _GONE:  # about to be overwritten
            buffer.move(Residence.AWAY)

    def uncopied(self, buffer: Buffer) -> None:
        """Forget a buffer's copy: it failed, or it is not needed any more."""
        if buffer.copy is None:
            return
        self._note(buffer)
        buffer.copy = None
        if buffer.residence is Residence.LEAVING:
            buffer.move(Residence.RESIDENT)
        elif buffer.residence is Residence.AWAY:
            self.num_vacated += 1
            buffer.move(buffer.residence_without_storage)

    def leave(self, buffer: Buffer) -> None:
        """Record that a buffer will be released as soon as its copy has arrived."""
        buffer.move(Residence.LEAVING)

    def unleave(self, buffer: Buffer) -> None:
        """Record that a buffer stays although its copy is in progress."""
        if buffer.residence is Residence.LEAVING:
            buffer.move(Residence.RESIDENT)

    def fetch(self, buffer: Buffer, fetch: Fetch) -> None:
        """Record that the transfer which brings a buffer back has started."""
        self._note(buffer)
        buffer.fetching = fetch
        buffer.move(Residence.RETURNING)

    def unfetch(self, buffer: Buffer) -> Fetch | None:
        """Detach and return a buffer's fetch: it has ended, or it is not needed any more."""
        self._note(buffer)
        fetch, buffer.fetching = buffer.fetching, None
        if buffer.residence is Residence.RETURNING:
            buffer.move(buffer.residence_without_storage)
        return fetch

    def cannot_replay(self, buffer: Buffer) -> None:
        """Rely on a buffer's content from now on, not on its op: hold it ([Note: the invariant]) if no tier has it."""
        self._note(buffer)
        buffer.op = None
        if buffer.copy is None:
            self.hold_again(buffer)

    def hold_again(self, buffer: Buffer) -> None:
        """Hold the storage of a buffer that has left while the program still has it."""
        storage = buffer.record.storage() if buffer.record is not None else None
        if buffer.strong is None and storage is not None:
            self._note(buffer)
            alias = byte_alias(storage)
            self._hold_by(buffer, alias, alias)

    def stay(self, buffer: Buffer, reason: int) -> None:
        """Make a buffer stay on the device from now on."""
        self._note(buffer)
        buffer.stays |= reason

    def stay_resizable(self, record: StorageRecord) -> None:
        """Make all contents of a storage stay: it is resized to 0 and filled again without autograd's knowledge."""
        if not self.has_resizable:
            self.has_resizable = True
            logging.getLogger("torchdelta").info(
                "some storages are freed and filled again (as FSDP does): they stay on the device, and ops that read "
                "them are not recomputed"
            )
        record.is_resizable = True
        if record.current is not None:
            self.stay(record.current, Stays.RESIZED)

    # -- surveys

    def _note(self, buffer: Buffer) -> None:
        if self._journal is not None:
            self._journal.note(buffer)

    def suspend_alias(self, alias: torch.Tensor) -> None:
        """Count a storage as freed by the program in a survey, if it has no other holder than an alias."""
        journal, record = self._journal, self.records.get(storage_address(alias))
        if journal is None or record is None:
            return
        if record.reference is not None or storage_num_holders(record.address) <= 1:
            self._suspend(journal, record)

    def _suspend(self, journal: Journal, record: StorageRecord) -> None:
        """Count a storage as freed if only the journal keeps it alive, by its alias and the storage's Python object."""
        if self.records.get(record.address) is record and storage_num_holders(record.address) <= 2:
            del self.records[record.address]
            journal.suspended.append(record)
            self.usage.add(-record.size_bytes)
            self._vacate(record)


def is_same_number(held: torch.Tensor, view: View) -> bool:
    """Return whether a tensor on a view's storage is the number that the view sees."""
    is_plain = not held.is_conj() and not held.is_neg() and not any(view.flags or ())
    return is_plain and held.dim() == 0 and held.dtype is view.dtype and held.storage_offset() == view.offset
