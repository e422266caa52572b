"""The disk tier: evicted bytes go to one unnamed file, with direct I/O where the file system has it.

Direct I/O needs page-aligned memory. The caching allocator aligns blocks to pages, so a part that consists of whole
pages is read or written in place. The C library's heap aligns to 64 bytes: then each thread copies its part through an
aligned staging buffer, and with two threads, the copy of one part overlaps the disk access of the other. Without direct
I/O there is no staging: the kernel copies between its page cache and the storage.

`posix_fallocate` takes disk space ahead, so that a full disk is an error when a slot is reserved, before any buffer is
written. File systems without it report a full disk as a failed write.

[Note: Forks during direct reads]
open(2) warns of direct I/O into private memory while the process forks. After a fork, parent and child share pages, and
a process that writes to a shared page gets a copy of it. If the parent writes to a page while the disk still fills it,
the rest arrives in the page that only the child has. Nobody writes to a part while it is read, and a part in place
consists of whole pages, so no other data lies on them. Before Linux 5.8 (commit 3917c80280c9) a write could copy a
whole huge page, on which other data does lie: there every part is staged. The staging buffers are shared memory, which
a fork never copies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import zlib
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError, TierIOError
from torchdelta.native.file_mapping import file_mapper
from torchdelta.runtime.tiers.arena import Segment
from torchdelta.runtime.tiers.mapped import MappedFile
from torchdelta.runtime.tiers.pooled import PooledTier
from torchdelta.runtime.tiers.scratch import BLOCK_BYTES, open_scratch_file, swap_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.runtime.tiers.base import Slot
    from torchdelta.runtime.tiers.jobs import Part
    from torchdelta.runtime.tiers.scratch import ScratchFile

__all__ = ["DiskMedium", "DiskTier"]

_PART_BYTES: Final = 4 << 20
_PAGE_BYTES: Final = max(BLOCK_BYTES, mmap.PAGESIZE)
_FIRST_SAFE_LINUX: Final = (5, 8)
_NUM_THREADS: Final = 2
_MAX_FRUITLESS: Final = 8  # a transfer fails after this many calls in a row that move no byte
_CANNOT_ALLOCATE: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def _moves_in_place(system: str, release: str) -> bool:
    """Return whether parts are read and written in place on this kernel; see [Note: Forks during direct reads]."""
    version = re.match(r"(\d+)\.(\d+)", release)
    if system != "Linux" or version is None:
        return False
    return (int(version[1]), int(version[2])) >= _FIRST_SAFE_LINUX


_MOVES_IN_PLACE: Final = _moves_in_place(platform.system(), platform.release())


class DiskMedium:
    """A scratch file, and a staging buffer for each thread."""

    name = "disk"
    budget_option = "disk_budget"
    block_bytes = BLOCK_BYTES
    least_piece_bytes = 1 << 20  # smaller pieces cost more time in seeks and calls than they save in file size
    is_walled = False
    _always_stages = False

    def __init__(self, scratch: ScratchFile, *, host_budget_bytes: int | None, checksum: bool) -> None:
        self._scratch = scratch
        self.descriptor = scratch.descriptor
        self._checksum = checksum
        self.start_write_bytes_per_s = scratch.write_bytes_per_s
        self.start_read_bytes_per_s = scratch.read_bytes_per_s
        self.num_threads = _NUM_THREADS
        self.part_bytes = _PART_BYTES
        self.staging_bytes = 0
        self._staging: list[Segment] = []
        self._views: list[memoryview] = []
        if scratch.is_direct or self._always_stages:
            self._set_up_staging(host_budget_bytes)

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Extend the file, and allocate the disk space now where the file system can."""
        try:
            os.posix_fallocate(self.descriptor, from_bytes, add_bytes)
        except OSError as error:
            # A file system that runs out in the middle keeps what it has allocated: free that.
            os.ftruncate(self.descriptor, from_bytes)
            if error.errno not in _CANNOT_ALLOCATE:
                raise OSError(error.errno, f"{error.strerror} in {str(self._scratch.directory)!r}") from error
            os.ftruncate(self.descriptor, from_bytes + add_bytes)

    def write_part(self, worker: int, part: Part) -> None:
        """Copy one part into the file."""
        view = part.view
        if self._is_staged(part):
            self._stage(part, self._staging[worker].address)
            view = self._staged(worker, part.size_bytes)
        if self._checksum:
            part.slot.checksums[part.index] = zlib.crc32(view)
        self._move(view, part.offset_bytes, is_read=False)

    def read_part(self, worker: int, part: Part) -> None:
        """Copy one part out of the file, and compare it with its checksum."""
        is_staged = self._is_staged(part)
        view = self._staged(worker, part.size_bytes) if is_staged else part.view
        self._move(view, part.offset_bytes, is_read=True)
        if self._checksum:
            found, wanted = zlib.crc32(view), part.slot.checksums[part.index]
            if found != wanted:
                raise TierIOError(
                    f"the checksum of {part.size_bytes} bytes at offset {part.offset_bytes} of the swap file in "
                    f"{str(self._scratch.directory)!r} is {found:08x} and was {wanted:08x} when they were written"
                )
        if is_staged:
            self._unstage(part, self._staging[worker].address)

    def close(self) -> None:
        """Close the file, which deletes it, and free the staging buffers."""
        self.leave_child()
        while self._views:
            self._views.pop().release()
        self._drop_staging()

    def leave_child(self) -> None:
        """Close the descriptor: a child that outlives its parent would keep the disk space allocated."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _set_up_staging(self, host_budget_bytes: int | None) -> None:
        if host_budget_bytes is not None:
            if host_budget_bytes < _NUM_THREADS * BLOCK_BYTES:
                self.num_threads = 1
            share_bytes = host_budget_bytes // self.num_threads // BLOCK_BYTES * BLOCK_BYTES
            if share_bytes == 0:
                raise TierError(
                    f"a host_budget of {host_budget_bytes} bytes is less than the {BLOCK_BYTES} bytes that the disk "
                    "tier needs for staging; raise host_budget"
                )
            self.part_bytes = min(_PART_BYTES, share_bytes)
        self.staging_bytes = self.num_threads * self.part_bytes
        for _ in range(self.num_threads):
            staging = self._new_staging(self.part_bytes)
            self._staging.append(staging)
            self._views.append(memoryview(staging.mapping))

    def _new_staging(self, size_bytes: int) -> Segment:
        # Shared, not private: see [Note: Forks during direct reads].
        return Segment(mmap.mmap(-1, size_bytes))

    def _drop_staging(self) -> None:
        for staging in self._staging:
            staging.mapping.close()

    def _is_staged(self, part: Part) -> bool:
        """Return whether a part is copied through a staging buffer.

        With direct I/O all parts are, except those that start at a page and consist of whole pages.
        """
        if not self._staging:
            return False
        if self._always_stages or not _MOVES_IN_PLACE:
            return True
        return part.address % _PAGE_BYTES != 0 or part.size_bytes % _PAGE_BYTES != 0

    def _stage(self, part: Part, staging_address: int) -> None:
        """Copy a part's bytes from the storage to a staging buffer."""
        ctypes.memmove(staging_address, part.address, part.size_bytes)

    def _unstage(self, part: Part, staging_address: int) -> None:
        """Copy a part's bytes from a staging buffer to the storage."""
        ctypes.memmove(part.address, staging_address, part.size_bytes)

    def _staged(self, worker: int, size_bytes: int) -> memoryview:
        """Return the staging bytes of a part, rounded up to the block: direct I/O moves whole blocks."""
        view = self._views[worker]
        rounded_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return view if rounded_bytes == len(view) else view[:rounded_bytes]

    def _move(self, view: memoryview, offset_bytes: int, *, is_read: bool) -> None:
        """Move all of `view`, with as many calls as it takes."""
        done_bytes = 0
        num_fruitless = 0
        while done_bytes < len(view):
            rest = view[done_bytes:] if done_bytes else view
            position = offset_bytes + done_bytes
            num_moved = (
                os.preadv(self.descriptor, [rest], position) if is_read else os.pwrite(self.descriptor, rest, position)
            )
            if self._staging:
                num_moved = num_moved // BLOCK_BYTES * BLOCK_BYTES  # the next call must start at a block
            done_bytes += num_moved
            num_fruitless = 0 if num_moved else num_fruitless + 1
            if num_fruitless == _MAX_FRUITLESS:
                raise TierIOError(
                    f"the swap file in {str(self._scratch.directory)!r} came {'back ' if is_read else ''}short: "
                    f"{done_bytes} of {len(view)} bytes at offset {offset_bytes}"
                )


class DiskTier(PooledTier):
    """An unnamed file as a tier.

    Args:
        swap_dir: Directory of the file. None: TORCHDELTA_SWAP_DIR, else the system's temporary directory.
        capacity_bytes: The most that the file may take (`disk_budget`). None: all the free space of the disk.
        host_budget_bytes: The most that staging may take; smaller budgets make smaller parts and slower transfers.
        checksum: Keep a CRC-32 of every part written and compare it when the part is read. Off by default: it runs
            at a few GB/s on a core that the training could use, which is more than 2 % of a step that swaps much
            (benchmarks/overheads.py).
        device: The device whose storages it copies; None for the CPU.
        new_medium: Makes the medium, from the file and the options: `DiskMedium`, or one that knows the device.
    """

    def __init__(
        self,
        *,
        swap_dir: str | os.PathLike[str] | None = None,
        capacity_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        checksum: bool = False,
        device: torch.device | None = None,
        new_medium: Callable[..., DiskMedium] = DiskMedium,
    ) -> None:
        scratch = open_scratch_file(swap_directory(swap_dir), capacity_bytes=capacity_bytes)
        self.direct = scratch.is_direct
        self.directory = scratch.directory
        try:
            medium = new_medium(scratch, host_budget_bytes=host_budget_bytes, checksum=checksum)
        except BaseException as error:
            os.close(scratch.descriptor)
            if isinstance(error, OSError):
                raise TierError(f"the disk tier has no memory for staging: {error.strerror or error}") from error
            raise
        super().__init__(medium, capacity_bytes=capacity_bytes, device=device)
        self._file = medium
        self._mapped: MappedFile | None = None

    def map_into(self, slot: Slot, storage: torch.UntypedStorage, keeper: object) -> bool:
        """Let an empty storage have the bytes of a slot as its memory.

        They are read once, and not kept, to find out whether they can be. After that, a page that the disk cannot read
        ends the process, as with any mapped file.
        """
        placed = self.written(self.reserved(slot))
        mapper = file_mapper()
        if mapper is None or storage.device.type != "cpu" or BLOCK_BYTES % mmap.PAGESIZE or not placed.size_bytes:
            return False
        try:
            if self._mapped is None:
                self._mapped = MappedFile(self._file.descriptor, mapper)
            self.check_readable(placed)
            self._mapped.map(placed, storage, keeper)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop the transfers, join the threads, close the file. What is mapped stays on the disk until it dies."""
        end_bytes = self.pool_bytes
        super().close()
        if self.closes_later:
            return
        mapped, self._mapped = self._mapped, None
        if mapped is not None and not self.owner.is_in_child():
            mapped.close(end_bytes)
