"""The trace while it is written: storages, their versions, what autograd saved. Mutable, and holds no tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torchdelta.trace.model import BEFORE_STEP, Buffer, BufferKind, Header, Op, Phase, SavedTensor, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(slots=True, eq=False)
class Version:
    """One content of one storage: a buffer of the trace."""

    id: int
    storage: Storage
    size_bytes: int
    birth_op: int
    death_op: int | None = None  # None: alive


@dataclasses.dataclass(slots=True, eq=False)
class Storage:
    """An allocation of the plain step; one or two fake storages stand for it."""

    id: int
    draft: Draft
    birth_phase: Phase | None  # None: before the step
    current: Version = dataclasses.field(init=False)
    kind: BufferKind | None = None  # once it is known
    num_living: int = 0

    def write(self, op: int) -> Version:
        """Overwrite the content by an op."""
        if self.current.birth_op == op:
            return self.current  # an op that writes two views of it
        self.current.death_op = op
        self.current = self.draft.new_version(self, self.current.size_bytes, op)
        return self.current

    def likely_kind(self) -> BufferKind:
        """Return what it is for."""
        if self.kind is not None:
            return self.kind
        if self.birth_phase is None:
            return "constant"
        return "activation" if self.birth_phase == "forward" else "temporary"


@dataclasses.dataclass(slots=True, eq=False)
class Saved:
    """A saved tensor: how it looks at which version."""

    op: int
    version: Version
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


class Draft:
    """All of it."""

    def __init__(self) -> None:
        self.versions: list[Version] = []  # by id
        self.ops: list[Op] = []
        self.saved: list[Saved] = []
        self._num_storages = 0

    def new_storage(self, size_bytes: int, birth_op: int, phase: Phase) -> Storage:
        """Put down an allocation and its first content."""
        storage = Storage(self._num_storages, self, None if birth_op == BEFORE_STEP else phase)
        self._num_storages += 1
        storage.current = self.new_version(storage, size_bytes, birth_op)
        return storage

    def new_version(self, storage: Storage, size_bytes: int, birth_op: int) -> Version:
        """Put down a content."""
        version = Version(len(self.versions), storage, size_bytes, birth_op)
        self.versions.append(version)
        return version

    def trace(self, header: Header) -> Trace:
        """Return it as a trace."""
        return Trace(
            header=header,
            buffers=tuple(self._buffers()),
            ops=tuple(self.ops),
            saved_tensors=tuple(
                SavedTensor(
                    op=saved.op,
                    buffer_id=saved.version.id,
                    shape=saved.shape,
                    stride=saved.stride,
                    offset=saved.offset,
                    dtype=saved.dtype,
                )
                for saved in self.saved
            ),
        )

    def _buffers(self) -> Iterator[Buffer]:
        saved_ids = {saved.version.id for saved in self.saved}
        for version in self.versions:
            yield Buffer(
                id=version.id,
                storage_id=version.storage.id,
                size_bytes=version.size_bytes,
                kind=version.storage.likely_kind(),
                birth_op=version.birth_op,
                death_op=len(self.ops) if version.death_op is None else version.death_op,
                saved=version.id in saved_ids,
            )
