"""The part of a swap file that storages have as their memory: its slots stay whole, also when the tier is closed.

See [Note: mapped back] in memory/emptying.py. The disk space of a slot is freed when its last mapping dies, unless the
process has forked since: the child has the mapping, too.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from torchdelta._torch.storages import address_of
from torchdelta.runtime.interrupts import destructor
from torchdelta.runtime.tiers.slots import Extent

if TYPE_CHECKING:
    import torch

    from torchdelta.native.file_mapping import FileMapper
    from torchdelta.runtime.tiers.slotted import PlacedSlot

__all__ = ["MappedFile", "between"]

_files: weakref.WeakSet[MappedFile] = weakref.WeakSet()


class MappedFile:
    """The mappings of one file. It dies with the last of them, or with its tier if that lives longer.

    Args:
        descriptor: Of the file; the tier may close it.
        mapper: The native module.

    Raises:
        OSError: The process has too many open files.
    """

    def __init__(self, descriptor: int, mapper: FileMapper) -> None:
        self.mapper = mapper
        self.descriptor = os.dup(descriptor)
        self.is_closed = False  # whether the tier is: no slot is used again
        self.was_forked = False
        self._pieces: weakref.WeakSet[_MappedSlot] = weakref.WeakSet()
        _files.add(self)

    def map(self, slot: PlacedSlot, storage: torch.UntypedStorage, keeper: object) -> None:
        """Let an empty storage have a slot as its memory.

        Raises:
            OSError: The file system cannot.
        """
        for extent in slot.extents:  # what an earlier mapping has read of other contents
            os.posix_fadvise(self.descriptor, *extent, os.POSIX_FADV_DONTNEED)
        piece = _MappedSlot(self, slot, keeper)
        self._pieces.add(piece)
        self.mapper.map_pieces(address_of(storage), slot.size_bytes, self.descriptor, list(slot.extents), piece)

    def close(self, end_bytes: int) -> None:
        """Free the disk space of all that is not mapped, up to the end of the file: the tier is closed."""
        self.is_closed = True
        self.free(between([extent for piece in self._pieces for extent in piece.slot.extents], end_bytes))

    def free(self, extents: list[Extent]) -> None:
        """Free the disk space of extents, unless a child may have them mapped."""
        if not self.was_forked:
            self.mapper.free_pieces(self.descriptor, list(extents))

    @destructor
    def __del__(self) -> None:
        os.close(self.descriptor)


class _MappedSlot:
    """A slot that is mapped. The mapping keeps it alive."""

    __slots__ = ("__weakref__", "file", "keeper", "slot")

    def __init__(self, file: MappedFile, slot: PlacedSlot, keeper: object) -> None:
        self.file = file
        self.slot = slot
        self.keeper = keeper

    @destructor
    def __del__(self) -> None:
        if self.file.is_closed:
            self.file.free(list(self.slot.extents))


def between(kept: list[Extent], end_bytes: int) -> list[Extent]:
    """Return what lies between extents, from the start to `end_bytes`."""
    free: list[Extent] = []
    start_bytes = 0
    for extent in [*sorted(kept), Extent(end_bytes, 0)]:
        if extent.offset_bytes > start_bytes:
            free.append(Extent(start_bytes, extent.offset_bytes - start_bytes))
        start_bytes = max(start_bytes, extent.offset_bytes + extent.size_bytes)
    return free


def _note_fork() -> None:
    for file in list(_files):
        file.was_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork)
