"""The ledger: every living storage on the device, its bytes, and whose content it holds now.

It only counts and names; making room is residency.py's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdelta._torch import NoDispatch, NoFunction, storage_address
from torchdelta.runtime.buffer import Buffer, StorageRecord, View
from torchdelta.runtime.subclasses import runs_own_ops

if TYPE_CHECKING:
    from torchdelta.native.counting import Counter
    from torchdelta.runtime.tracing import TraceBuilder

WRAPPED_NUMBER_BYTES = 16


class Ledger:
    """All storages known to a session. `live_bytes` is what counts against the budget."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)  # with its index: memory of another GPU is no more ours than the CPU's
        self.new_device = self.device  # where storages of the runtime's own are made; "meta" in a survey (survey.py)
        self.counted_devices = frozenset({self.device})
        self.records: dict[int, StorageRecord] = {}
        self.live_bytes = 0  # of the storages that are known
        self.unseen_bytes = 0  # what the counter had beyond them when it was last asked
        self.counter: Counter | None = None  # at the allocator, where there is one (native/counting.py)
        self.is_counting = False  # off in a survey, whose storages take no memory
        self._sees_peaks = True  # the counter does; without one, and with one that does not, peaks are added up here
        self._is_cheap = True  # to ask it
        self._peak_bytes = 0
        self.late_bytes = 0  # of parameters that the scan did not find (see scan.py)
        self.clock = 0  # ops seen; the unit of staleness
        self.held: dict[int, Buffer] = {}  # buffers kept alive by us: what could be evicted
        self.trace: TraceBuilder | None = None

    # -- at the allocator

    def count_with(self, counter: Counter) -> None:
        """Count at the allocator from now on. What lives already is added as it becomes known."""
        assert not self.records
        self.counter = counter
        self.is_counting = True
        self._sees_peaks = getattr(counter, "is_exact", True)  # an accelerator's (device_counter.py) is neither
        self._is_cheap = getattr(counter, "is_cheap", True)
        counter.start()

    @property
    def has_exact_peak(self) -> bool:
        """Whether `peak_bytes` is the allocator's own."""
        return self.is_counting and self._sees_peaks

    def ask_counter(self, *, fresh: bool = False) -> None:
        """Find out how much lives that no storage here accounts for (negative: more is known than lives).

        `fresh`: also where asking is dear; else the last answer stands there.
        """
        if self.is_counting and self.counter is not None and (fresh or self._is_cheap):
            self.unseen_bytes = self.counter.live_bytes() - self.live_bytes
            self._raise_peak(self.live_bytes)

    @property
    def total_bytes(self) -> int:
        """What counts against the budget: the known storages, and what the counter had beyond them."""
        return self.live_bytes + self.unseen_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `total_bytes` since this was last set; exact where there is a counter."""
        if self.has_exact_peak and self.counter is not None:
            self._peak_bytes = max(self._peak_bytes, self.counter.take_peak_bytes())
        return self._peak_bytes

    @peak_bytes.setter
    def peak_bytes(self, size_bytes: int) -> None:
        if self.has_exact_peak and self.counter is not None:
            self.counter.take_peak_bytes()
        self._peak_bytes = size_bytes

    def restart_peak(self) -> None:
        """Measure the peak anew from here."""
        self.ask_counter(fresh=True)
        self.peak_bytes = self.total_bytes

    # -- storages

    def know(self, storage: torch.UntypedStorage) -> StorageRecord:
        """Return the record of a storage, making one when it is new.

        From now on the storage object itself is watched.
        """
        address = storage._cdata
        record = self.records.get(address)
        if record is None:
            record = StorageRecord(
                address, storage.nbytes() if storage.device in self.counted_devices else 0, self._died
            )
            record.watch_storage(storage)
            # Fake storages, which a failed survey may leave behind, warn when they are asked for their address.
            self._add(record, storage.data_ptr() if self.is_counting and record.size_bytes else 0)
        elif record.reference is None:
            record.watch_storage(storage)
        return record

    def know_by_tensor(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Count a tensor of backward without touching its storage object. See [Note: two ways to see a storage die].

        The size is that of the tensor: what backward makes afresh fills its storage. Views of a known storage only add
        a holder.
        """
        try:
            address = storage_address(tensor)
        except RuntimeError:  # sparse and other opaque tensors have no storage
            return None
        record = self.records.get(address)
        if record is None:
            if tensor.layout is not torch.strided or tensor.device != self.device:
                return None
            if tensor.is_nested:  # without strides
                return self.know(tensor.untyped_storage())
            record = StorageRecord(address, _dense_bytes(tensor), self._died)
            record.watch_tensor(tensor)
            self._add(record, _storage_start(tensor) if self.is_counting else 0)
        elif record.reference is None:
            record.watch_tensor(tensor)
        return record

    def find(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage if there is one."""
        return self.records.get(storage_address(tensor))

    def resize(self, record: StorageRecord, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Note that a storage has another size now."""
        self.live_bytes += size_bytes - record.size_bytes
        self._leave_counter(record)
        record.size_bytes = size_bytes
        self._enter_counter(record, storage.data_ptr() if self.is_counting else 0)
        self._raise_peak(self.live_bytes)

    def note_workspace(self, size_bytes: int) -> None:
        """Note that the op which has just run is thought to have had this much inside itself, beside what lives now."""
        self._raise_peak(self.live_bytes + size_bytes)

    def _raise_peak(self, size_bytes: int) -> None:
        if not self.has_exact_peak and size_bytes + self.unseen_bytes > self._peak_bytes:
            self._peak_bytes = size_bytes + self.unseen_bytes

    def _add(self, record: StorageRecord, address: int) -> None:
        self.records[record.address] = record
        self.live_bytes += record.size_bytes
        self._enter_counter(record, address)
        self._raise_peak(self.live_bytes)

    def _enter_counter(self, record: StorageRecord, address: int) -> None:
        """Add a storage to the counter if its memory was not allocated under it (`address` 0: it has none)."""
        counter = self.counter
        if counter is not None and address and record.size_bytes and not counter.owns(address):
            record.is_foreign = True
            counter.add(record.size_bytes)

    def _leave_counter(self, record: StorageRecord) -> None:
        if record.is_foreign and self.counter is not None:
            record.is_foreign = False
            self.counter.add(-record.size_bytes)

    def _died(self, record: StorageRecord) -> None:
        if self.records.get(record.address) is record:
            del self.records[record.address]
            self.live_bytes -= record.size_bytes
            self._leave_counter(record)
        # A record and its weak reference hold each other. Left to the collector, dead pairs would stay on the lists of
        # storages that live on, and CPython 3.11 walks such a list while it allocates, so that a collection in that
        # moment frees the list under its feet (a crash).
        record.reference = record.holders = None
        buffer = record.current
        record.current = None
        if self.trace is not None:
            self.trace.on_storage_death(record, buffer)
        if buffer is not None and buffer.record is record:
            buffer.record = None

    # -- buffers

    def buffer_of(self, tensor: torch.Tensor) -> Buffer:
        """Return the buffer that a tensor's storage holds now; a storage of unknown origin gets one without an op."""
        storage = tensor.untyped_storage()
        record = self.records.get(storage._cdata)
        if record is None and tensor.is_leaf and tensor.requires_grad:
            self.late_bytes += storage.nbytes()
        if record is None or record.reference is None:
            record = self.know(storage)
        buffer = record.current
        if buffer is None:
            buffer = Buffer(record.size_bytes)
            buffer.record = record
            record.current = buffer
            buffer.is_pinned = record.is_resizable or (tensor.is_leaf and tensor.requires_grad)
        return buffer

    def view_of(self, tensor: torch.Tensor) -> View:
        """Return how a tensor looks at its buffer, for the tape.

        A buffer without an op is held from here on (see [Note: the invariant]).
        """
        buffer = self.buffer_of(tensor)
        buffer.last_used = self.clock
        view = View(buffer, tensor)
        if buffer.op is None and buffer.strong is None and buffer.copy is None:
            self.hold(buffer, tensor)
            if _is_parameter(tensor):
                buffer.is_pinned = True
        if (
            tensor._is_zerotensor()
        ):  # zeros without memory (forward-mode derivatives): there is nothing to rebuild them on
            buffer.is_pinned = True
            view.tensor = buffer.strong
        elif not view.shape and buffer.op is None and buffer.size_bytes <= WRAPPED_NUMBER_BYTES:
            view.tensor = buffer.witness if buffer.witness is not None else buffer.strong
        return view

    def hold(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Keep a buffer's storage alive through an alias.

        Remember whose version tells of writes that nobody recorded.
        """
        with NoDispatch(), NoFunction():
            if not runs_own_ops(tensor.__class__):
                alias = tensor.detach()
            else:  # a fake tensor of a survey
                storage = tensor.untyped_storage()
                alias = tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                    storage, 0, (storage.nbytes(),), (1,)
                )
            witness = tensor if tensor.is_leaf and buffer.op is None else alias
            version = 0 if witness.is_inference() else witness._version
            buffer.strong, buffer.witness, buffer.witness_version = alias, witness, version
            if witness.is_inference():
                buffer.witness = None  # such tensors count no versions
        buffer.keeper = self
        self.held[id(buffer)] = buffer

    def let_go(self, buffer: Buffer) -> None:
        """Stop keeping a buffer's storage alive."""
        buffer.keeper = None
        buffer.strong = None
        buffer.witness = None
        self.held.pop(id(buffer), None)

    def cut(self) -> None:
        """Forget how everything that lives was made.

        Nothing saved is left, so nothing will be recomputed from before this moment.

        Without it the tape would grow from step to step (a momentum buffer is made from itself), and an optimizer's
        in-place ops would have to preserve the old parameters for a loss that somebody still holds.
        """
        for record in list(self.records.values()):
            buffer = record.current
            if buffer is not None:
                buffer.op = None
                buffer.copy = None
                buffer.successor = None
        held, self.held = self.held, {}
        for buffer in held.values():
            buffer.op = None
            buffer.copy = None
            buffer.keeper = None
            buffer.strong = None
            buffer.witness = None

    def forget(self) -> None:
        """Stop counting; the storages themselves are not ours."""
        for record in self.records.values():
            record.reference = record.holders = None  # as in `_died`
        self.records.clear()
        self.live_bytes = self.unseen_bytes = 0
        self.is_counting = False
        self.counter = None


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a leaf that is trained, or a view of one."""
    if tensor.__class__ is torch.nn.Parameter or (tensor.is_leaf and tensor.requires_grad):
        return True
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad


def _storage_start(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind a tensor, without touching its storage object."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage behind a fresh tensor.

    The extent of its strides, which padding or expansion makes differ from its count.
    """
    if tensor.is_contiguous():
        return (tensor.storage_offset() + tensor.numel()) * tensor.element_size()  # pyright: ignore[reportReturnType]
    extent = 1 + tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (length - 1) * stride
    return extent * tensor.element_size()  # pyright: ignore[reportReturnType]
