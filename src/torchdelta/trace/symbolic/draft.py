"""The trace while it is written: storages, their versions, what autograd saved. Mutable, and holds no tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torchdelta.trace.draft import Saved, Version, finished
from torchdelta.trace.model import BEFORE_STEP

if TYPE_CHECKING:
    from torchdelta.trace.model import BufferKind, Header, Op, Phase, Trace


@dataclasses.dataclass(slots=True, eq=False)
class Storage:
    """An allocation of the plain step; one or two fake storages stand for it."""

    id: int
    draft: Draft
    birth_phase: Phase | None  # None: before the step
    current: Version[Storage] = dataclasses.field(init=False)
    kind: BufferKind | None = None  # once it is known
    num_living: int = 0
    first_bytes: int = 0

    def write(self, op: int) -> Version[Storage]:
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


class Draft:
    """All of it."""

    def __init__(self) -> None:
        self.versions: list[Version[Storage]] = []  # by id
        self.ops: list[Op] = []
        self.saved: list[Saved[Storage]] = []
        self._num_storages = 0

    def new_storage(self, size_bytes: int, birth_op: int, phase: Phase) -> Storage:
        """Put down an allocation and its first content."""
        storage = Storage(self._num_storages, self, None if birth_op == BEFORE_STEP else phase)
        self._num_storages += 1
        storage.current = self.new_version(storage, size_bytes, birth_op)
        storage.first_bytes = size_bytes
        return storage

    def new_version(self, storage: Storage, size_bytes: int, birth_op: int) -> Version[Storage]:
        """Put down a content."""
        version = Version(len(self.versions), storage, size_bytes, birth_op)
        self.versions.append(version)
        return version

    def trace(self, header: Header) -> Trace:
        """Return it as a trace."""
        return finished(header, self.versions, self.ops, self.saved)
