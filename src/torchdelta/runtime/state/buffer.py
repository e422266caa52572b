"""Buffers, the storages that hold them, the ops that make them, and views of them.

All of these are mutable. A `Buffer` is one version of the content of one storage, and may outlive that storage. A
`StorageRecord` is one living storage, an `OpEntry` one recorded op, and a `View` is how an op or a saved tensor sees a
buffer. Only the verbs of ledger.py write where content is and what a storage holds. The other fields are written by
those who know them: `num_views` by `View`, `last_used` and `num_locks` in memory/ as well, `digest` by `Room`, and the
measurements and random state of an `OpEntry` by the recorder and the device's timer.

[Note: the invariant]
Every buffer that may still be read is *held* (`strong`), or has a copy on a tier (`copy`), or is the current content of
a living storage, or can be recomputed by its op from buffers that satisfy the same condition. A buffer without an op is
held from its first use on and can only be swapped. If an in-place op overwrites such a buffer and the replay of a
dropped buffer still reads it, its content is copied first. Otherwise the ops that read it can no longer be replayed.
"""

from __future__ import annotations

import enum
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import torch

from torchdelta._torch.device import numeric_environment
from torchdelta._torch.storages import storage_address, storage_at, storage_num_holders
from torchdelta._torch.tensors import conj, neg_view, tensor_num_holders
from torchdelta.runtime.interrupts import destructor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.native.weak_storage import WeakStorage
    from torchdelta.runtime.state.copies import Emptied, Fetch, TierCopy

_ids = itertools.count()
_Watched = TypeVar("_Watched", torch.UntypedStorage, torch.Tensor)


class Residence(enum.Enum):
    """Where the content of a buffer is."""

    RESIDENT = "in a living storage: made by an op, or brought back"
    LEAVING = "evicted, but still in its storage while the copy to the tier is in progress"
    AWAY = "on a tier only"
    DROPPED = "nowhere: replaying its op recomputes it"
    RETURNING = "on a tier, and being copied into a new storage"
    GONE = "nowhere, and cannot be brought back: dead or overwritten"

    __hash__ = object.__hash__  # an enum's own is slow Python, and every new content is looked up in `TRANSITIONS`


_R = Residence
_RESIDENT: Final = Residence.RESIDENT
# The allowed transitions. The storage may die in any state that has one.
TRANSITIONS: Final = {
    _R.RESIDENT: {_R.LEAVING, _R.AWAY, _R.DROPPED, _R.GONE},
    _R.LEAVING: {_R.RESIDENT, _R.AWAY, _R.DROPPED, _R.GONE},
    _R.AWAY: {_R.RETURNING, _R.RESIDENT, _R.DROPPED, _R.GONE},
    _R.DROPPED: {_R.RESIDENT, _R.GONE},
    _R.RETURNING: {_R.RESIDENT, _R.AWAY, _R.DROPPED, _R.GONE},
    _R.GONE: {_R.RESIDENT, _R.AWAY},  # its content is copied just before it is overwritten
}


class Stays:
    """Why a buffer never leaves the device: bits of `Buffer.stays`. Plain ints, since those of an enum are slow."""

    LEAF = 1  # a parameter or another trained leaf: the program holds it
    RESIZED = 2  # its storage is resized to 0 and filled again without autograd's knowledge (resized.py)
    IN_FLIGHT = 4  # a collective may still be writing it
    OTHER_STREAM = 8  # an op on another stream reads or wrote it (device/streams.py)
    NOT_OURS = 16  # evicting it frees nothing (zeros without memory), or its alignment would change (storages.py)


# `sys.getrefcount` of an object that one attribute refers to, asked through a local variable.
_REFERENCES_OF_ONE_HOLDER: Final = 3


class Releaser(Protocol):
    """Releases the storages that it holds through `Buffer.strong`. Implemented by the ledger."""

    def release(self, buffer: Buffer) -> None:
        """Stop holding a buffer's storage."""


class Buffer:
    """One version of the content of one storage."""

    __slots__ = (
        "__weakref__",
        "copy",
        "digest",
        "fetching",
        "has_left",
        "id",
        "last_used",
        "num_locks",
        "num_saved",
        "num_views",
        "op",
        "origin",
        "output_index",
        "record",
        "releaser",
        "residence",
        "save_order",
        "size_bytes",
        "stays",
        "strong",
        "successor",
        "witness",
        "witness_address",
        "witness_version",
    )

    def __init__(
        self,
        size_bytes: int,
        record: StorageRecord | None = None,
        op: OpEntry | None = None,
        origin: str = "",
        output_index: int = 0,
        last_used: int = 0,
    ) -> None:
        self.id = next(_ids)
        self.size_bytes = size_bytes
        self.residence = _RESIDENT
        self.op = op  # replaying it recomputes the buffer; None: the buffer cannot be recomputed
        self.output_index = output_index  # among the op's outputs, or among its written storages
        self.origin = origin  # name of the op that made it, for messages; set even if that op cannot be replayed
        self.record = record  # the living storage whose current content this is
        self.strong: torch.Tensor | None = None  # an alias that keeps the storage alive
        self.witness: torch.Tensor | None = None  # its version counter shows writes that were not recorded
        self.witness_version = 0
        self.witness_address = 0  # of its storage; with another one it tells nothing of this content any more
        self.releaser: Releaser | None = None  # set with `strong`: releases it
        self.num_saved = 0  # handles of saved tensors on it
        self.has_left = False  # whether it was evicted since it was first saved
        self.num_views = 0  # views of it, on the tape and in handles: how many depend on its content
        self.num_locks = 0  # > 0: a running replay relies on it
        self.copy: TierCopy | None = None  # its copy on a tier
        self.fetching: Fetch | None = None  # the transfer that brings this copy back
        self.last_used = last_used  # op clock
        self.save_order = 0  # position among the buffers saved in the step; backward needs the last one first
        self.stays = 0  # `Stays`: the reasons why it never leaves
        self.successor: Buffer | None = None  # the next content of the same storage, if this one was saved
        self.digest: bytes | None = None  # hash of the content when it was dropped, if replays are verified

    def move(self, residence: Residence) -> None:
        """Record where the content is from now on. Only the verbs of ledger.py call this."""
        if residence is not self.residence:
            assert residence in TRANSITIONS[self.residence], (self.residence, residence)
            self.residence = residence

    def is_held_by_us_alone(self) -> bool:
        """Return whether only the runtime keeps the storage alive.

        It does so by its alias, by the storage's Python object, and by a witness that the program itself has dropped.
        """
        if self.strong is None:
            return False
        address = storage_address(self.strong)
        num_holders = storage_num_holders(address)
        return num_holders <= 2 or (num_holders == 3 and self._has_dropped_witness(address))

    def _has_dropped_witness(self, address: int) -> bool:
        """Return whether the witness is a tensor on the storage at this address that nobody else refers to."""
        witness = self.witness
        if witness is None or witness is self.strong or storage_address(witness) != address:
            return False
        return tensor_num_holders(witness) == 1 and sys.getrefcount(witness) <= _REFERENCES_OF_ONE_HOLDER

    @property
    def residence_without_storage(self) -> Residence:
        """Where the content is when no storage holds it."""
        if self.fetching is not None:
            return Residence.RETURNING
        if self.copy is not None:
            return Residence.AWAY
        return Residence.DROPPED if self.op is not None else Residence.GONE


class OpEntry:
    """One recorded op. Its arguments are stored by value, with a `View` in place of each tensor."""

    __slots__ = (
        "__weakref__",
        "args",
        "environment",
        "facts",
        "func",
        "grad_enabled",
        "kwargs",
        "output_bytes",
        "outputs",
        "position",
        "random_state",
        "time_s",
        "workspace_bytes",
    )

    def __init__(self, func: Any, facts: OpFacts, args: list[Any], kwargs: dict[str, Any] | None) -> None:
        self.func = func
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.grad_enabled = torch.is_grad_enabled()
        self.environment = numeric_environment()
        self.time_s = 0.0
        self.output_bytes = 0  # of all outputs, including those that are dead but made again by a replay
        self.workspace_bytes = 0  # what the op allocates and frees again while it runs
        self.random_state: tuple[torch.Generator, torch.Tensor] | None = None
        self.outputs: list[weakref.ref[Buffer]] = []
        self.position: tuple[int, int] = (-1, -1)  # number of a `Learning` (follow/learning.py), and the place there


class StorageRecord:
    """One living storage, counted against the budget until it dies.

    [Note: two ways to see a storage die]
    In forward a weak reference to the storage object tells. In backward that object must not be made (see [Note:
    storages are known by address] in _torch/storages.py), so there the tensors on the storage are watched. When the
    last known one dies and the storage does not, an alias was made where no op is seen (the engine's `detach` of a new
    `.grad`), and the record changes over to the first way (`Storages.recheck_unwatched`, before the next op).

    A tensor may exchange its storage (`tensor.data = other`, `set_`), so it may outlive the storage that it had.
    Therefore a record that is watched through tensors has a `WeakStorage`: while it exists, the address is not reused
    for another storage, and `is_dead` is always valid. Such an exchange triggers no callback: see `Ledger.sweep`.
    """

    __slots__ = (
        "address",
        "current",
        "emptied",
        "holders",
        "id",
        "is_exported",
        "is_fake",
        "is_foreign",
        "is_outside",
        "is_resizable",
        "is_unaligned",
        "num_writing",
        "on_death",
        "on_unwatched",
        "reference",
        "size_bytes",
        "spare",
        "weak",
    )

    def __init__(
        self,
        address: int,
        size_bytes: int,
        on_death: Callable[[StorageRecord], None],
        on_unwatched: Callable[[StorageRecord], None],
    ) -> None:
        self.id = next(_ids)
        self.address = address
        self.size_bytes = size_bytes
        self.on_death = on_death
        self.on_unwatched = on_unwatched  # the last known tensor is dying, perhaps together with its storage
        self.current: Buffer | None = None
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.holders: dict[int, weakref.ref[torch.Tensor]] | None = None
        self.weak: WeakStorage | None = None  # set while `holders` are watched
        self.is_fake = self.is_unaligned = False  # the latter: see `ALIGNMENT_BYTES` in storages.py
        self.is_foreign = False  # its memory was not allocated under the counter (native/counting.py)
        self.is_outside: bool | None = None  # code outside of torch may write its memory at any time; None: not asked
        self.emptied: Emptied | None = None  # while its content is on a tier only
        self.spare: Emptied | None = None  # a copy of what it holds, until something may have written it
        self.is_exported, self.num_writing = False, 0  # not emptied: read without an op, or by so many file writers
        self.is_resizable = False  # resized to 0 and filled again without autograd's knowledge: see resized.py

    def watch_storage(self, storage: torch.UntypedStorage) -> None:
        """Watch the storage object itself from now on."""
        self.holders = None
        reference = _RecordReference(storage, _storage_died)
        reference.record = self
        self.reference = reference
        self.weak = None  # only after the new reference exists

    def watch_tensor(self, tensor: torch.Tensor) -> None:
        """Watch one more tensor on a storage that is watched through its tensors. `weak` must be set."""
        if self.reference is not None:
            return
        assert self.weak is not None
        self.holders = {} if self.holders is None else self.holders
        reference = _RecordReference(tensor, _tensor_died)
        reference.record = self
        self.holders[id(reference)] = reference

    def storage(self) -> torch.UntypedStorage | None:
        """Return the living storage object, or None. Always None for a storage that is watched through its tensors."""
        return self.reference() if self.reference is not None else None

    def is_dead(self) -> bool:
        """Return whether the storage is known to have died without a callback."""
        return self.weak is not None and self.weak.num_holders() == 0

    def watch_again(self) -> bool:
        """Watch the storage object if the last known tensor has died. Return whether the storage lives."""
        return True if self.holders or self.weak is None else self.watch_anew()

    def watch_anew(self) -> bool:
        """Watch the storage object in place of the tensors; `weak` must be set. Return whether the storage lives."""
        storage = None if self.is_dead() else storage_at(self.address)
        if storage is None:
            return False
        self.watch_storage(storage)
        return True

    def forget(self) -> None:
        """Stop watching. From now on the address may belong to another storage."""
        self.reference = self.holders = self.weak = None


class _RecordReference(weakref.ref[_Watched]):
    __slots__ = ("record",)

    record: StorageRecord  # set by whoever makes the reference: a method of its own would cost a call per storage


def records_watching(tensor: torch.Tensor) -> list[StorageRecord]:
    """Return the records that watch their storage through a tensor."""
    return [reference.record for reference in weakref.getweakrefs(tensor) if reference.__class__ is _RecordReference]


@destructor
def _storage_died(reference: Any) -> None:
    record: StorageRecord = reference.record
    if record.reference is reference:
        record.on_death(record)


@destructor
def _tensor_died(reference: Any) -> None:
    record: StorageRecord = reference.record
    holders = record.holders
    if holders is None or holders.pop(id(reference), None) is None or holders:
        return
    # The last holder of the storage may be the dying tensor itself, or an unknown one if that tensor has exchanged its
    # storage. Only after the tensor's death does the number of holders tell which.
    if record.is_dead():
        record.on_death(record)
    else:
        record.on_unwatched(record)


class View:
    """How a tensor sees a buffer: what is needed to rebuild the tensor on a storage with the buffer's content."""

    __slots__ = ("buffer", "dtype", "flags", "offset", "shape", "stride", "tensor")

    def __init__(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        self.buffer = buffer
        buffer.num_views += 1
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        # Set for wrapped numbers (0-dim, from Python scalars): they have a flag that changes type promotion and that
        # rebuilding would lose.
        self.tensor: torch.Tensor | None = None
        is_neg = tensor.is_neg()
        self.flags = (tensor.is_conj(), is_neg) if dtype.is_complex or is_neg else None

    @classmethod
    def of(cls, buffer: Buffer, shape: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> View:
        """Return the view of a plain tensor that does not exist any more."""
        view = cls.__new__(cls)
        view.buffer = buffer
        buffer.num_views += 1
        view.shape, view.stride, view.offset, view.dtype = shape, stride, offset, dtype
        view.tensor = view.flags = None
        return view

    @destructor
    def __del__(self) -> None:
        buffer = self.buffer
        buffer.num_views -= 1
        if buffer.num_views == 0 and buffer.op is None and buffer.num_saved == 0 and buffer.releaser is not None:
            # It was held only because it cannot be recomputed. Nothing needs it any more.
            buffer.releaser.release(buffer)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Build the tensor on `storage`. Call this inside `Quietly`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )
        if self.flags is not None:
            if self.flags[0]:
                tensor = conj(tensor)
            if self.flags[1]:
                tensor = neg_view(tensor)
        return tensor
