"""What a trace consists of while it is written, whoever writes it: contents without an end, views that may still move.

The recorder and the symbolic tracer follow storages each in their own way (`runtime/observe/draft.py`,
`trace/symbolic/draft.py`); what they put down, and how it becomes a trace, is the same.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torchdelta.trace.model import Buffer, Header, Op, SavedTensor, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdelta.trace.model import BufferKind

__all__ = ["DraftStorage", "Saved", "Version", "created_by", "finished"]


class DraftStorage(Protocol):
    """An allocation of the plain step, as its writer follows it."""

    id: int

    def likely_kind(self) -> BufferKind:
        """Return what it is for, as well as is known."""
        ...


S = TypeVar("S", bound=DraftStorage)


@dataclasses.dataclass(slots=True, eq=False)
class Version(Generic[S]):
    """One content of one storage: a buffer of the trace."""

    id: int
    storage: S
    size_bytes: int
    birth_op: int
    death_op: int | None = None  # None: alive


@dataclasses.dataclass(slots=True, eq=False)
class Saved(Generic[S]):
    """A saved tensor: how it looks at which version."""

    op: int
    version: Version[S]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: object  # "float32" or torch.float32


def finished(header: Header, versions: Sequence[Version[S]], ops: Sequence[Op], saved: Sequence[Saved[S]]) -> Trace:
    """Return all of it as a trace; what is alive outlives the step."""
    saved_ids = {one.version.id for one in saved}
    return Trace(
        header=header,
        buffers=tuple(
            Buffer(
                id=version.id,
                storage_id=version.storage.id,
                size_bytes=version.size_bytes,
                kind=version.storage.likely_kind(),
                birth_op=version.birth_op,
                death_op=len(ops) if version.death_op is None else version.death_op,
                saved=version.id in saved_ids,
            )
            for version in versions
        ),
        ops=tuple(ops),
        saved_tensors=tuple(
            SavedTensor(
                op=one.op,
                buffer_id=one.version.id,
                shape=one.shape,
                stride=one.stride,
                offset=one.offset,
                dtype=str(one.dtype).removeprefix("torch."),
            )
            for one in saved
        ),
    )


def created_by(part: str) -> str:
    """Return what stands in the header: the library, its version, and the part of it that wrote the trace."""
    try:
        version = metadata.version("torchdelta")
    except metadata.PackageNotFoundError:  # run from its source
        return f"torchdelta {part}"
    return f"torchdelta {version} {part}"
