"""The part of a swap file that storages have as their memory: its slots stay whole, also when the tier is closed.

See [Note: mapped back] in memory/emptying.py.

[Note: mappings and forks]
When the last mapping of a slot dies, an open tier uses its disk space again, and that of a closed tier is freed. A
forked child has the same mappings, and reads the file whenever it touches a page. So slots that were mapped at a fork
are neither used again nor freed before the file itself ends. The child's mappings keep the file alive.
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
        self._descriptor = -1
        self._descriptor = os.dup(descriptor)
        self._mapper = mapper
        self._is_closed = False  # whether the tier is: no slot is used again
        self._slots: weakref.WeakSet[_MappedSlot] = weakref.WeakSet()
        self._of_children: list[object] = []  # keepers of slots that children may have mapped
        self._extents_of_children: set[Extent] = set()
        _files.add(self)

    def map(self, slot: PlacedSlot, storage: torch.UntypedStorage, keeper: object) -> None:
        """Let an empty storage have a slot as its memory.

        Raises:
            OSError: The file system cannot.
        """
        for extent in slot.extents:  # what an earlier mapping has read of other contents
            os.posix_fadvise(self._descriptor, *extent, os.POSIX_FADV_DONTNEED)
        mapped = _MappedSlot(self, slot, keeper)
        mapped.is_in_child = not self._extents_of_children.isdisjoint(slot.extents)  # it was mapped before
        self._slots.add(mapped)
        self._mapper.map_pieces(address_of(storage), slot.size_bytes, self._descriptor, list(slot.extents), mapped)

    def close(self, end_bytes: int) -> None:
        """Free the disk space of all that is not mapped, up to the end of the file: the tier is closed."""
        self._is_closed = True
        mapped = [extent for each in self._slots for extent in each.slot.extents]
        self._free(between([*mapped, *self._extents_of_children], end_bytes))

    def end(self, mapped: _MappedSlot) -> None:
        """A mapping has died."""
        if mapped.is_in_child:
            self._of_children.append(mapped.keeper)
            self._extents_of_children.update(mapped.slot.extents)
        elif self._is_closed:
            self._free(list(mapped.slot.extents))

    def note_fork(self) -> None:
        """Note that the process is about to fork."""
        for mapped in list(self._slots):
            mapped.is_in_child = True

    def leave_child(self) -> None:
        """Close the file in a forked child, whose own mappings keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _free(self, extents: list[Extent]) -> None:
        if self._descriptor >= 0:
            self._mapper.free_pieces(self._descriptor, list(extents))

    @destructor
    def __del__(self) -> None:
        self.leave_child()


class _MappedSlot:
    """A slot that is mapped once. The mapping keeps this alive."""

    __slots__ = ("__weakref__", "file", "is_in_child", "keeper", "slot")

    def __init__(self, file: MappedFile, slot: PlacedSlot, keeper: object) -> None:
        self.file = file
        self.slot = slot
        self.keeper = keeper
        self.is_in_child = False

    @destructor
    def __del__(self) -> None:
        self.file.end(self)


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
        file.note_fork()


def _leave_children() -> None:
    for file in list(_files):
        file.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork, after_in_child=_leave_children)
