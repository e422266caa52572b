"""The journal of a survey: the state of every buffer before the survey changed it, so that it can be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.state.buffer import Buffer, StorageRecord

__all__ = ["Journal"]

# The counts of handles, views and locks are not restored: they count real objects, which die in a survey as usual.
_FIELDS: Final = (
    "copy",
    "fetching",
    "releaser",
    "op",
    "record",
    "residence",
    "stays",
    "strong",
    "successor",
    "witness",
    "witness_address",
    "witness_version",
)
_STRONG: Final = _FIELDS.index("strong")


class Journal:
    """Keeps the storages alive that a survey evicts, so that its evictions change byte counts only.

    Args:
        records: The living storages when the survey begins.
    """

    def __init__(self, records: dict[int, StorageRecord]) -> None:
        self._buffers: dict[int, tuple[Buffer, tuple[Any, ...]]] = {}
        self._contents = {record.id: (record, record.current) for record in list(records.values())}
        self.suspended: list[StorageRecord] = []  # counted as freed by the survey, but still alive

    def knows(self, record: StorageRecord) -> bool:
        """Return whether a storage was known when the survey began."""
        return record.id in self._contents

    def note(self, buffer: Buffer) -> None:
        """Save a buffer's state before its first change."""
        if id(buffer) not in self._buffers:
            self._buffers[id(buffer)] = (buffer, tuple(getattr(buffer, name) for name in _FIELDS))

    def holds(self, buffer: Buffer, alias: torch.Tensor) -> bool:
        """Return whether the journal holds the storage behind a buffer's alias."""
        return self._buffers[id(buffer)][1][_STRONG] is alias

    def restore(self) -> list[Buffer]:
        """Restore the state of every buffer and storage. Return the buffers."""
        for record, buffer in self._contents.values():
            record.current = buffer
        restored: list[Buffer] = []
        for buffer, values in self._buffers.values():
            for name, value in zip(_FIELDS, values, strict=True):
                setattr(buffer, name, value)
            restored.append(buffer)
        return restored
