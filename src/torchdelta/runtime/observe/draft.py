"""The draft of a step's trace: storages, their versions, and the living storages that represent them.

`trace_builder.py` receives the events of the runtime. This file stores them, and at the end converts them to the model
of `torchdelta.trace.model`. Nothing here keeps a tensor, storage or buffer alive: they are known by the ids of their
records and buffers.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from msgspec import structs

from torchdelta.trace.draft import Saved, Version, created_by, finished
from torchdelta.trace.model import Header

if TYPE_CHECKING:
    from torchdelta.runtime.device.op_timer import OpTimer
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.need import Timing
    from torchdelta.trace.model import BufferKind, Op, Phase, Trace

__all__ = ["Draft", "PlainStorage", "PlainVersion", "size_of"]

# How many dead gradients are remembered as possible summands of the engine's next sum.
NUM_RECENT: Final = 8


class PlainStorage:
    """A storage of the plain step. See [Note: the trace is that of the plain step] in trace_builder.py."""

    __slots__ = (
        "birth_phase",
        "current",
        "id",
        "is_alive",
        "is_external",
        "is_optimizers",
        "is_read",
        "kind",
        "noted_version",
        "records",
        "saved",
    )

    def __init__(self, id_: int, birth_phase: Phase | None) -> None:
        self.id = id_
        self.birth_phase = birth_phase  # None: before the step
        self.kind: BufferKind | None = None  # None: not known for certain
        self.current: PlainVersion
        self.is_alive = True
        self.is_external = False  # no op made it
        self.is_read = False  # by the forward
        self.is_optimizers = False  # made or written by an optimizer
        self.noted_version = 0  # torch's version counter at the last look at the content
        self.records: set[int] = set()  # ids of the records of the living storages that represent it
        self.saved: set[int] = set()  # ids of its buffers that handles need

    def likely_kind(self) -> BufferKind:
        """Return the kind, or the best guess at the end of the step."""
        if self.kind is not None:
            return self.kind
        if self.birth_phase is None:
            if self.is_optimizers:
                return "optimizer_state"
            return "input" if self.is_read else "constant"
        if self.birth_phase == "forward":
            return "input" if self.is_external else "activation"
        return "optimizer_state" if self.is_optimizers and self.is_alive else "temporary"


PlainVersion: TypeAlias = Version[PlainStorage]


class Draft:
    """The storages, versions, ops and saved tensors of a trace that is being written."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.ops: list[Op] = []
        self.versions: list[PlainVersion] = []  # by id
        self.saved: list[Saved[PlainStorage]] = []
        self.by_record: dict[int, PlainVersion] = {}  # what living storages hold, by the id of their record
        self.by_buffer: dict[int, PlainVersion] = {}  # by the id of the runtime's buffer
        self.num_storages = 0
        self.end_of_op = 0  # index after the last op, pseudo-ops not included
        self.recent: collections.deque[PlainStorage] = collections.deque(maxlen=NUM_RECENT)  # the last dead gradients
        self.flowing: set[PlainStorage] = set()  # the input gradients of the last node
        self.start_of_node = 0  # index of its first op
        self._timings: dict[int, Timing] = {}  # by index: timings of ops that were not over when they were added

    def time_later(self, index: int, timing: Timing | None) -> None:
        """Remember the timing of an asynchronous op for `correct_times`."""
        if timing is not None:
            self._timings[index] = timing

    def correct_times(self, timer: OpTimer) -> None:
        """Set the measured times of asynchronous ops. See [Note: times of asynchronous ops] in op_timer.py."""
        if self._timings:
            timer.poll(wait=True)
        for index, timing in self._timings.items():
            self.ops[index] = structs.replace(self.ops[index], time_s=timing.time_s)
        self._timings.clear()

    def born(
        self, record: StorageRecord, birth_op: int, phase: Phase | None, *, by_optimizer: bool = False
    ) -> PlainVersion:
        """Add a storage that was not known before."""
        storage = PlainStorage(self.num_storages, phase)
        self.num_storages += 1
        storage.is_optimizers = by_optimizer
        storage.records.add(record.id)
        version = self.by_record[record.id] = self._version(storage, size_of(record), birth_op)
        if record.current is not None:
            self.by_buffer[record.current.id] = version
        return version

    def overwritten(self, old: PlainVersion, record: StorageRecord, index: int) -> PlainVersion:
        """Add a version of a storage that an op has written."""
        storage = old.storage
        old.death_op = index
        version = self._version(storage, size_of(record), index)
        for other in storage.records:  # copies of the old content, for replays
            self.by_record.pop(other, None)
        storage.records = {record.id}
        self.by_record[record.id] = version
        buffer = record.current
        if buffer is not None:
            self.by_buffer[buffer.id] = version
            if buffer.num_saved:  # the handles follow the storage: see [Note: a saved tensor follows its storage]
                storage.saved.add(buffer.id)
        # The op saved this tensor before it wrote it (the noise of `rrelu`): backward reads the new content.
        for saved in reversed(self.saved):
            if saved.op < self.end_of_op:
                break
            if saved.version is old:
                saved.version, saved.op = version, index  # pseudo-ops may lie between
        return version

    def _version(self, storage: PlainStorage, size_bytes: int, birth_op: int) -> PlainVersion:
        version = storage.current = Version(len(self.versions), storage, size_bytes, birth_op)
        self.versions.append(version)
        return version

    def returned(self, version: PlainVersion, record: StorageRecord) -> None:
        """Add a living storage that represents a plain one."""
        storage = version.storage
        if storage.is_alive and storage.current is version:
            self.by_record[record.id] = version
            storage.records.add(record.id)

    def gone(self, record: StorageRecord) -> None:
        """Remove a living storage that died. The plain storage lives on while handles need it."""
        version = self.by_record.pop(record.id, None)
        if version is not None:
            storage = version.storage
            storage.records.discard(record.id)
            if not storage.records and not storage.saved:
                self.die(storage)

    def die(self, storage: PlainStorage, index: int | None = None) -> None:
        """End the life of a plain storage: before the next op, or before op `index`."""
        if not storage.is_alive:
            return
        storage.is_alive = False
        version = storage.current
        version.death_op = max(len(self.ops) if index is None else index, version.birth_op + 1)
        for record_id in storage.records:
            self.by_record.pop(record_id, None)
        storage.records.clear()
        if storage.birth_phase == "backward":
            self.recent.append(storage)

    def sources_of_sum(self, size_bytes: int, num_sources: int) -> list[int]:
        """Return the likely summands of a sum made by the engine, and extend their lives to it.

        They are gradients of the same size that died since the last op.
        """
        index = len(self.ops)
        sources: list[int] = []
        # The last node has consumed its input gradients, unless it ran no ops and passed them on.
        used_up = self.flowing if index > self.start_of_node else set[PlainStorage]()
        for storage in reversed(self.recent):
            version = storage.current
            if storage in used_up:
                continue
            if len(sources) < num_sources and version.size_bytes == size_bytes and version.death_op == index:
                version.death_op = index + 1
                sources.append(version.id)
        return sources

    def trace(self) -> Trace:
        """Convert the draft to a trace."""
        header = Header(
            torch_version=str(torch.__version__),
            device=self.device_type,
            device_name=torch.cuda.get_device_name() if self.device_type == "cuda" else "",
            created_by=created_by("recorder"),
        )
        return finished(header, self.versions, self.ops, self.saved)


def size_of(record: StorageRecord) -> int:
    """Return the bytes that a storage has while its content is here."""
    return record.size_bytes if record.emptied is None else record.emptied.size_bytes
