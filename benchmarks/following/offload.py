"""Offloads every large saved tensor to the swap tier, as `OffloadActivations` of TRL and torchtune do to the host.

A peer, not a part of the library: hooks that write each saved storage once, let at most a few writes be under way, and
read ahead in backward. It has our disk tier under it, so that only the decisions differ: it has no budget, no plan and
no notion of what is cheap to recompute.
"""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from torch import Tensor, nn

LEAST_BYTES = 1 << 18  # smaller tensors stay: a transfer would cost more than it frees
MOST_WRITES = 4  # storages that wait for the end of their write; torchtune's stash holds five
NUM_AHEAD = 2  # storages that are read before backward needs them


class Copy:
    """The content of one storage in the tier."""

    __slots__ = ("__weakref__", "read", "size_bytes", "slot", "storage", "tier", "write")

    def __init__(self, tier: Any, storage: torch.UntypedStorage) -> None:
        self.tier = tier
        self.size_bytes = storage.nbytes()
        self.slot = tier.reserve(self.size_bytes)
        self.storage: torch.UntypedStorage | None = storage
        self.write = tier.write(self.slot, storage)
        self.read: Any = None

    def __del__(self) -> None:
        """Free the slot with the last saved tensor that needs it."""
        self.tier.release(self.slot)

    def let_go(self) -> None:
        """Free the memory once the write has ended."""
        if self.write is not None:
            self.write.wait()
            self.write = self.storage = None

    def begin_read(self) -> None:
        """Start to bring the content back, unless it is there."""
        if self.storage is None:
            self.storage = torch.UntypedStorage(self.size_bytes)
            self.read = self.tier.read(self.slot, self.storage)

    def content(self) -> torch.UntypedStorage:
        """Return the storage, filled."""
        self.begin_read()
        if self.read is not None:
            self.read.wait()
            self.read = None
        assert self.storage is not None
        return self.storage


class Offloaded:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("copy", "dtype", "index", "layout")

    def __init__(self, copy: Copy, index: int, tensor: Tensor) -> None:
        self.copy = copy
        self.index = index
        self.dtype = tensor.dtype
        self.layout = tensor.storage_offset(), tensor.shape, tensor.stride()


class Offload:
    """The scope: `with Offload(model): ...` around whole steps.

    Args:
        model: Its parameters and buffers stay.
    """

    def __init__(self, model: nn.Module) -> None:
        from torchdelta.runtime.tiers import open_tier

        self.staying = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.tier = open_tier("disk")
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        # By address of the storage; the weak reference keeps another storage from getting the same one.
        self.known: dict[int, tuple[StorageWeakRef, int, weakref.ref[Copy]]] = {}
        self.order: list[weakref.ref[Copy]] = []  # as the step saved them
        self.writing: collections.deque[Copy] = collections.deque()
        self.is_backward = False

    def __enter__(self) -> Self:
        """Begin to offload."""
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop, when no graph is left."""
        self.hooks.__exit__(*exception)
        self.writing.clear()
        self.known.clear()
        self.order.clear()
        self.tier.close()

    def pack(self, tensor: Tensor) -> object:
        """Start to write a saved tensor's storage."""
        if self.is_backward:  # the next step begins
            self.is_backward = False
            self.known.clear()
            self.order.clear()
        storage = tensor.untyped_storage()
        if storage._cdata in self.staying or storage.nbytes() < LEAST_BYTES:
            return tensor
        weak, version, copy = self.known.get(storage._cdata, (None, -1, None))
        found = copy() if copy is not None and version == tensor._version else None
        if found is None or weak is None or weak.expired():
            found = Copy(self.tier, storage)
            self.known[storage._cdata] = StorageWeakRef(storage), tensor._version, weakref.ref(found)
            self.order.append(weakref.ref(found))
            self.writing.append(found)
            while len(self.writing) > MOST_WRITES or (self.writing and self.writing[0].write.is_done()):
                self.writing.popleft().let_go()
        return Offloaded(found, len(self.order) - 1, tensor)

    def unpack(self, packed: object) -> Tensor:
        """Return a saved tensor, and read the next ones ahead."""
        if not isinstance(packed, Offloaded):
            assert isinstance(packed, torch.Tensor)
            return packed
        if not self.is_backward:
            self.is_backward = True
            # What was written last is needed first: it never has to leave.
            while self.writing and self.writing[0].write.is_done():
                self.writing.popleft().let_go()
            for copy in self.writing:
                copy.write.wait()
                copy.write = None
            self.writing.clear()
        storage = packed.copy.content()
        num_ahead = 0
        for index in range(min(packed.index, len(self.order)) - 1, -1, -1):
            copy = self.order[index]()
            if copy is not None:
                copy.begin_read()
                num_ahead += 1
            if num_ahead == NUM_AHEAD:
                break
        return torch.empty(0, dtype=packed.dtype).set_(storage, *packed.layout)
