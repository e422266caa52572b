"""The nouns that the runtime moves: buffers, the storages that hold them, and views of them.

Mutable state, all of it: a `Buffer` is one version of the content of one storage and outlives it (that is the point), a
`StorageRecord` is one living storage, a `View` is how an op or a saved tensor looked at a buffer.

[Note: the invariant]
Every buffer that somebody may still want is *held* (`strong`), or has a copy on a tier (`copy`), or is the current
content of a living storage, or can be recomputed by its op from buffers of which the same is true. A buffer without an
op is held from its first use on and can only be swapped; before an in-place op writes such a buffer, its content is
copied if anything still depends on it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from torchdelta import _torch
from torchdelta._torch import storage_at, storage_num_holders
from torchdelta.errors import TierError
from torchdelta.runtime.interrupts import destructor, enter, leave_unraising

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.ledger import Ledger
    from torchdelta.runtime.tape import OpEntry
    from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

_ids = itertools.count()


class Buffer:
    """One version of the content of one storage."""

    __slots__ = (
        "__weakref__",
        "copy",
        "digest",
        "fetching",
        "id",
        "is_pinned",
        "keeper",
        "last_used",
        "num_locks",
        "num_saved",
        "num_views",
        "op",
        "origin",
        "output_index",
        "record",
        "save_order",
        "size_bytes",
        "strong",
        "successor",
        "witness",
        "witness_version",
    )

    def __init__(self, size_bytes: int) -> None:
        self.id = next(_ids)
        self.size_bytes = size_bytes
        self.op: OpEntry | None = None  # what recomputes it; None: cannot be recomputed
        self.output_index: int = 0  # among the op's outputs, or among its written storages
        self.origin: str = ""  # the op that made it, for people, also when it cannot be recomputed
        self.record: StorageRecord | None = None  # the living storage whose current content this is
        self.strong: torch.Tensor | None = None  # an alias that keeps the storage alive
        self.witness: torch.Tensor | None = None  # whose version tells of writes that the recorder could not see
        self.witness_version = 0
        self.keeper: Ledger | None = None  # who holds `strong`
        self.num_saved = 0  # handles of saved tensors on it
        self.num_views = 0  # views of it, on the tape and in handles: who depends on its content
        self.num_locks = 0  # > 0: a recomputation counts on its being there
        self.copy: TierCopy | None = None  # its copy on a tier
        self.fetching: Fetch | None = None  # that copy on its way in
        self.last_used = 0  # op clock
        self.save_order = 0  # position among the buffers saved in the step; backward wants them about last-in first-out
        self.is_pinned = False  # parameters and leaves: autograd keeps them whatever we do
        self.successor: Buffer | None = (
            None  # the next content of the same storage, when this one was saved (see saved.py)
        )
        self.digest: bytes | None = None


class TierCopy:
    """A buffer's content on a tier; the slot goes back when the last one who could want the content is gone."""

    __slots__ = ("slot", "source", "tier", "transfer")

    def __init__(self, tier: Tier, slot: Slot, transfer: Transfer | None, source: torch.UntypedStorage) -> None:
        self.tier = tier
        self.slot = slot
        self.transfer = transfer  # on its way out; None once it has arrived
        self.source: torch.UntypedStorage | None = source  # what it is copied from, alive until it has arrived

    def is_there(self) -> bool:
        """Say whether the content has arrived, without waiting."""
        return self.transfer is None or self.transfer.is_done()

    def arrive(self) -> float:
        """Wait until the content has arrived. Returns the seconds waited; raises TierIOError when it will not."""
        if self.transfer is None:
            return 0.0
        try:
            stall_s = self.transfer.wait()
        except TierError:
            self.transfer = self.source = None
            raise
        # Not after a KeyboardInterrupt in the wait: the copy is still under way then.
        self.transfer = self.source = None
        return stall_s

    @destructor
    def __del__(self) -> None:
        # Never wait here: a collection may run this under the tier's own lock. The tier keeps the storage alive until
        # its copy has ended.
        outer = enter()
        try:
            self.tier.release(self.slot)
        finally:
            leave_unraising(outer)


class SurveyedCopy(TierCopy):
    """A copy in name only, for a survey: nothing was moved and nothing can be read."""

    __slots__ = ()

    def __init__(self) -> None:
        self.transfer = self.source = None

    def __del__(self) -> None:
        return


class Fetch:
    """A buffer's content on its way back. The tier keeps the target storage alive until the transfer has ended."""

    __slots__ = ("copy", "storage", "transfer")

    def __init__(self, copy: TierCopy, storage: torch.UntypedStorage) -> None:
        self.copy = copy
        self.storage = storage
        self.transfer: Transfer = copy.tier.read(copy.slot, storage)


class StorageRecord:
    """One living storage, counted against the budget until it dies.

    [Note: two ways to see a storage die]
    In forward a weak reference to the storage object tells. In backward that object must not be made (see [Note:
    storages are known by address] in _torch.py), so there the tensors on the storage are watched; when the last known
    one dies and the storage does not, somebody made an alias where we could not look (the engine's `detach` of a new
    `.grad`), and the record changes over to the first way.
    """

    __slots__ = (
        "address",
        "current",
        "holders",
        "id",
        "is_fake",
        "is_foreign",
        "is_resizable",
        "on_death",
        "reference",
        "size_bytes",
    )

    def __init__(self, address: int, size_bytes: int, on_death: Callable[[StorageRecord], None]) -> None:
        self.id = next(_ids)
        self.address = address
        self.size_bytes = size_bytes
        self.on_death = on_death
        self.current: Buffer | None = None
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.holders: dict[int, weakref.ref[torch.Tensor]] | None = None
        self.is_fake = False
        self.is_foreign = False  # its memory was not allocated under the counter (native/counting.py)
        self.is_resizable = False  # freed and filled again behind autograd's back: see resized.py

    def watch_storage(self, storage: torch.UntypedStorage) -> None:
        """Follow the storage object itself from now on."""
        self.holders = None
        self.reference = _StorageReference(storage, self)

    def watch_tensor(self, tensor: torch.Tensor) -> None:
        """Follow one more tensor on a storage that is watched through its tensors."""
        if self.reference is not None:
            return
        if self.holders is None:
            self.holders = {}
        reference = _TensorReference(tensor, self)
        self.holders[id(reference)] = reference

    def storage(self) -> torch.UntypedStorage | None:
        """Return the living storage object, or None (also for a storage watched through its tensors.

        Those are never fetched).
        """
        return self.reference() if self.reference is not None else None


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("record",)

    def __new__(cls, storage: torch.UntypedStorage, record: StorageRecord) -> Self:
        self = super().__new__(cls, storage, _storage_died)
        self.record = record
        return self

    def __init__(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        del record  # taken by `__new__`
        super().__init__(storage, _storage_died)  # pyright: ignore[reportCallIssue]


class _TensorReference(weakref.ref[torch.Tensor]):
    __slots__ = ("record",)

    def __new__(cls, tensor: torch.Tensor, record: StorageRecord) -> Self:
        self = super().__new__(cls, tensor, _tensor_died)
        self.record = record
        return self

    def __init__(self, tensor: torch.Tensor, record: StorageRecord) -> None:
        del record  # taken by `__new__`
        super().__init__(tensor, _tensor_died)  # pyright: ignore[reportCallIssue]


@destructor
def _storage_died(reference: Any) -> None:
    outer = enter()
    try:
        record: StorageRecord = reference.record
        if record.reference is reference:
            record.on_death(record)
    finally:
        leave_unraising(outer)


@destructor
def _tensor_died(reference: Any) -> None:
    outer = enter()
    try:
        _one_holder_less(reference)
    finally:
        leave_unraising(outer)


def _one_holder_less(reference: Any) -> None:
    record: StorageRecord = reference.record
    holders = record.holders
    if holders is None or holders.pop(id(reference), None) is None or holders:
        return
    # The dying tensor still holds the storage here, so the address is alive: 1 holder is the dying tensor itself.
    if storage_num_holders(record.address) > 1:
        record.watch_storage(storage_at(record.address))
    else:
        record.on_death(record)


class View:
    """A tensor's look at a buffer: what is needed to build the tensor again on a storage with the buffer's content."""

    __slots__ = ("buffer", "dtype", "flags", "offset", "shape", "stride", "tensor")

    def __init__(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        self.buffer = buffer
        buffer.num_views += 1
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        # Wrapped numbers (0-dim, from Python scalars) carry a flag that promotes types differently and that no
        # rebuilding restores.
        self.tensor: torch.Tensor | None = None
        is_neg = tensor.is_neg()
        self.flags = (tensor.is_conj(), is_neg) if dtype.is_complex or is_neg else None

    @destructor
    def __del__(self) -> None:
        outer = enter()
        try:
            buffer = self.buffer
            buffer.num_views -= 1
            if buffer.num_views == 0 and buffer.op is None and buffer.num_saved == 0 and buffer.keeper is not None:
                # It was held only because nothing could make it again: now nothing wants it.
                buffer.keeper.let_go(buffer)
        finally:
            leave_unraising(outer)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Build the tensor on `storage`. Call it inside `Quietly`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )
        if self.flags is not None:
            if self.flags[0]:
                tensor = _torch.conj(tensor)
            if self.flags[1]:
                tensor = _torch.neg_view(tensor)
        return tensor
