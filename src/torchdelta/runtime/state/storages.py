"""The storages of a session: which are alive, how large they are, and what they add to the usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.storages import address_of, memory_behind, storage_address, storage_behind, tensor_address
from torchdelta._torch.tensors import is_zerotensor
from torchdelta.native.weak_storage import weak_storage_type
from torchdelta.runtime.state.buffer import StorageRecord, records_watching
from torchdelta.runtime.state.kinds import inner_tensors
from torchdelta.runtime.state.outside_memory import is_outside_storage
from torchdelta.runtime.state.usage import Usage

if TYPE_CHECKING:
    from torchdelta.runtime.state.copies import Emptied
    from torchdelta.runtime.state.observer import Observing

__all__ = ["Storages", "dense_bytes", "memory_address"]

# Of the memory that torch allocates on a CPU. Where memory is aligned otherwise, a library that adds in vectors (MKL)
# may begin them elsewhere, and the sums have other bits. So what is in such memory (a file that safetensors has read)
# stays there. Memory of NumPy and DLPack stays at any address: it is aligned by chance, and steps should be alike.
ALIGNMENT_BYTES: Final = 64


class Storages:
    """All storages known to a session: the part of the ledger that counts bytes."""

    def __init__(self, device: torch.device | str, observing: Observing) -> None:
        self.device = torch.device(device)  # with its index: the budget does not include another GPU's memory
        self.new_device = self.device  # where the runtime creates storages; "meta" in a survey
        self.counted_devices = frozenset({self.device})
        self.usage = Usage()
        self.observing = observing
        self.records: dict[int, StorageRecord] = {}
        self.num_emptied = 0  # storages whose content is on a tier only, those that are being read back included
        self.unwatched: list[StorageRecord] = []  # records whose last known tensor has died since the last op
        self._weak_storage = weak_storage_type()  # None: every storage is watched through its storage object

    def know(self, storage: torch.UntypedStorage) -> StorageRecord:
        """Return the record of a storage, making one when it is new.

        From now on the storage object itself is watched.
        """
        address = address_of(storage)
        record = self.records.get(address)
        if record is None:
            device = storage.device
            size_bytes = storage.nbytes() if device in self.counted_devices else 0
            start = 0
            is_fake = False
            if self.usage.is_counting and size_bytes:  # a fake storage warns if asked for its data pointer
                start = memory_address(storage)
                if not start:
                    size_bytes = 0
            else:
                is_fake = device.type == "meta"
            record = StorageRecord(address, size_bytes, self._died, self._unwatched)
            record.is_fake = is_fake
            if device.type == "cpu" and device == self.device and not storage.resizable():
                is_aligned = (start or memory_address(storage)) % ALIGNMENT_BYTES == 0
                record.is_unaligned = not is_aligned or is_outside_storage(storage)
            record.watch_storage(storage)
            self._add(record, start)
        elif record.reference is None:
            record.watch_storage(storage)
            if record.size_bytes and record.size_bytes != storage.nbytes():  # its size was that of its tensor so far
                self.resize(record, storage, storage.nbytes())
        return record

    def know_by_tensor(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Count a tensor of backward without touching its storage object. See [Note: two ways to see a storage die].

        The storage's size is taken to be that of the tensor, because new tensors of backward fill their storages. A
        view of a known storage only adds a holder.
        """
        try:
            address = storage_address(tensor)
        except RuntimeError:  # sparse and other opaque tensors have no storage
            return None
        record = self.records.get(address)
        if record is None:
            if tensor.layout is not torch.strided or tensor.device != self.device or is_zerotensor(tensor):
                return None
            if tensor.is_nested or self._weak_storage is None:  # without strides; without the native module
                return self.know(storage_behind(tensor))
            record = StorageRecord(address, dense_bytes(tensor), self._died, self._unwatched)
            record.weak = self._weak_storage(address)
            record.watch_tensor(tensor)
            self._add(record, _storage_start(tensor) if self.usage.is_counting else 0)
        elif record.reference is None:
            record.watch_tensor(tensor)
        return record

    def know_inner(self, value: Any) -> None:
        """Count the plain tensors behind a tensor, or behind those in a list, that no recorded op made."""
        for item in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(item, torch.Tensor):
                continue
            in_backward = graph_task_id() != -1 and not torch.is_grad_enabled()
            for inner in inner_tensors(item):
                try:
                    if storage_address(inner) not in self.records:
                        if in_backward and inner is item:
                            self.know_by_tensor(inner)
                        else:
                            self.know(storage_behind(inner))
                except RuntimeError:  # sparse and other layouts without a storage
                    continue

    def find(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage, or None."""
        return self.records.get(storage_address(tensor))

    def _unwatched(self, record: StorageRecord) -> None:
        if graph_task_id() == -1:  # outside of backward a storage object costs the engine nothing
            record.watch_again()
        else:
            self.unwatched.append(record)

    def recheck_unwatched(self) -> None:
        """Find out which storages are still alive after the death of their last known tensor."""
        unwatched = self.unwatched
        while unwatched:
            record = unwatched.pop()
            if not record.watch_again():
                self._died(record)

    def watch_storages_of(self, *tensors: torch.Tensor) -> None:
        """Watch the storages that are watched through these tensors by their objects from now on.

        Afterwards no record refers to the tensors. See [Note: two ways to see a storage die] in buffer.py.
        """
        for tensor in tensors:
            for record in records_watching(tensor):
                if not record.watch_anew():
                    self._died(record)

    def sweep(self) -> int:
        """Remove the storages that died when a tensor exchanged its storage. Return their bytes."""
        self.recheck_unwatched()
        before_bytes = self.usage.live_bytes
        for record in list(self.records.values()):
            if record.is_dead():
                self._died(record)
        return before_bytes - self.usage.live_bytes

    def resize(self, record: StorageRecord, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Record the new size of a storage."""
        self._leave_counter(record)
        grown_bytes, record.size_bytes = size_bytes - record.size_bytes, size_bytes
        self._enter_counter(record, memory_behind(storage) if self.usage.is_counting else 0)
        self.usage.add(grown_bytes)

    def emptied(self, record: StorageRecord, storage: torch.UntypedStorage, content: Emptied) -> None:
        """Record that the memory of a storage was freed in place: it has 0 bytes, and its content is on a tier."""
        record.emptied, record.spare = content, None
        self.num_emptied += 1
        self.resize(record, storage, 0)

    def refilled(self, record: StorageRecord, storage: torch.UntypedStorage) -> None:
        """Record that a storage has its memory and its content again."""
        content, record.emptied = record.emptied, None
        assert content is not None
        record.spare = content
        self.num_emptied -= 1
        self.resize(record, storage, content.size_bytes)

    def _add(self, record: StorageRecord, address: int) -> None:
        self.records[record.address] = record
        self._enter_counter(record, address)
        self.usage.add(record.size_bytes)

    def _enter_counter(self, record: StorageRecord, address: int) -> None:
        """Add a storage to the counter if its memory was not allocated under it. `address` 0: it has no memory."""
        counter = self.usage.counter
        if counter is not None and address and record.size_bytes and not counter.owns(address):
            record.is_foreign = True
            counter.add(record.size_bytes)

    def _leave_counter(self, record: StorageRecord) -> None:
        if record.is_foreign and self.usage.counter is not None:
            record.is_foreign = False
            self.usage.counter.add(-record.size_bytes)

    def _died(self, record: StorageRecord) -> None:
        if self.records.get(record.address) is record:
            del self.records[record.address]
            self.usage.add(-record.size_bytes)
        self._leave_counter(record)
        if record.emptied is not None:
            self.num_emptied -= 1
        record.emptied = record.spare = None
        # A record and its weak reference form a cycle. If the garbage collector had to free it, the weak reference
        # would stay in the list of a storage that lives on. CPython 3.11 walks that list while it allocates, and a
        # collection at that moment frees the list entry in use (a crash).
        record.forget()
        self.observing.observer.on_storage_death(record)
        if record.current is not None:
            self._vacate(record)

    def _vacate(self, record: StorageRecord) -> None:
        """Record that a storage no longer holds its buffer. Implemented by `Contents`."""
        raise NotImplementedError


def memory_address(storage: torch.UntypedStorage) -> int:
    """Return where a storage's memory begins, or 0 if it has none (the zeros of forward-mode AD)."""
    try:
        return memory_behind(storage)
    except RuntimeError:
        return 0


def _storage_start(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind a tensor, without touching its storage object."""
    return tensor_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()


def dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage behind a new tensor, from its strides: it may be padded or expanded."""
    if tensor.is_contiguous():
        return (tensor.storage_offset() + tensor.numel()) * tensor.element_size()  # pyright: ignore[reportReturnType]
    extent = 1 + tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (length - 1) * stride
    return extent * tensor.element_size()  # pyright: ignore[reportReturnType]
