"""The disk tier: swapped bytes go to one nameless file, past the page cache where the file system allows it.

Direct I/O wants page-aligned memory, and torch aligns to 64 bytes; so each thread owns one aligned staging buffer and
copies a part through it. With two threads the copy of one part runs beside the disk access of the other. Without
direct I/O there is no staging: the kernel copies into its page cache straight from the storage.

Disk space is taken ahead, by `posix_fallocate`, so that a full disk is an error when room is reserved, not when a
buffer is already on its way. File systems that cannot do that report a full disk as a failed write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import zlib
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.tiers.pooled import PooledTier
from torchdelta.runtime.tiers.scratch import BLOCK_BYTES, open_scratch_file, swap_directory

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.copier import Part
    from torchdelta.runtime.tiers.scratch import ScratchFile

__all__ = ["DiskMedium", "DiskTier"]

_PART_BYTES: Final = 4 << 20
_NUM_THREADS: Final = 2
_MAX_FRUITLESS: Final = 8  # calls in a row that move nothing before a transfer is given up
_CANNOT_ALLOCATE: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class DiskMedium:
    """One scratch file, and a staging buffer for each thread."""

    name = "disk"
    budget_option = "disk_budget"
    block_bytes = BLOCK_BYTES
    least_piece_bytes = 1 << 20  # smaller pieces would cost more in seeks and calls than the file in room
    is_walled = False
    _always_stages = False

    def __init__(self, scratch: ScratchFile, *, host_budget_bytes: int | None, checksum: bool) -> None:
        self._scratch = scratch
        self._descriptor = scratch.descriptor
        self._checksum = checksum
        self.start_write_bytes_per_s = scratch.write_bytes_per_s
        self.start_read_bytes_per_s = scratch.read_bytes_per_s
        self.num_threads = _NUM_THREADS
        self.part_bytes = _PART_BYTES
        self.staging_bytes = 0
        self._staging: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._addresses: list[int] = []
        if scratch.is_direct or self._always_stages:
            self._set_up_staging(host_budget_bytes)

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Make the file longer, and take the room now where the file system can."""
        try:
            os.posix_fallocate(self._descriptor, from_bytes, add_bytes)
        except OSError as error:
            # A file system that ran out in the middle keeps what it had allocated: give that back.
            os.ftruncate(self._descriptor, from_bytes)
            if error.errno not in _CANNOT_ALLOCATE:
                raise OSError(error.errno, f"{error.strerror} in {str(self._scratch.directory)!r}") from error
            os.ftruncate(self._descriptor, from_bytes + add_bytes)

    def write_part(self, worker: int, part: Part) -> None:
        """Copy one part into the file."""
        view = part.view
        if self._staging:
            self._stage(part, self._addresses[worker])
            view = self._staged(worker, part.size_bytes)
        if self._checksum:
            part.slot.checksums[part.index] = zlib.crc32(view)
        self._move(view, part.offset_bytes, is_read=False)

    def read_part(self, worker: int, part: Part) -> None:
        """Copy one part out of the file, and compare it with its checksum."""
        view = self._staged(worker, part.size_bytes) if self._staging else part.view
        self._move(view, part.offset_bytes, is_read=True)
        if self._checksum:
            found, wanted = zlib.crc32(view), part.slot.checksums[part.index]
            if found != wanted:
                raise TierIOError(
                    f"the checksum of {part.size_bytes} bytes at offset {part.offset_bytes} of the swap file in "
                    f"{str(self._scratch.directory)!r} is {found:08x} and was {wanted:08x} when they were written"
                )
        if self._staging:
            self._unstage(part, self._addresses[worker])

    def close(self) -> None:
        """Close the file, which ends it, and drop the staging buffers."""
        self.leave_child()
        while self._views:
            self._views.pop().release()
        self._drop_staging()

    def leave_child(self) -> None:
        """Close the descriptor: a child that lives on would keep the file's room taken after the parent's end."""
        descriptor, self._descriptor = self._descriptor, -1
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
            self._views.append(memoryview(staging))
            self._addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(staging)))

    def _new_staging(self, size_bytes: int) -> mmap.mmap:
        # Shared, not private: a fork in the middle of a direct read would leave the parent a stale private page.
        return mmap.mmap(-1, size_bytes)

    def _drop_staging(self) -> None:
        for staging in self._staging:
            staging.close()

    def _stage(self, part: Part, staging_address: int) -> None:
        """Bring a part's bytes into a staging buffer."""
        ctypes.memmove(staging_address, part.address, part.size_bytes)

    def _unstage(self, part: Part, staging_address: int) -> None:
        """Bring what was read from a staging buffer to where it belongs."""
        ctypes.memmove(part.address, staging_address, part.size_bytes)

    def _staged(self, worker: int, size_bytes: int) -> memoryview:
        """View the staging bytes of a part, rounded up to the block: direct I/O moves whole blocks."""
        view = self._views[worker]
        rounded_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return view if rounded_bytes == len(view) else view[:rounded_bytes]

    def _move(self, view: memoryview, offset_bytes: int, *, is_read: bool) -> None:
        """Move all of `view`, however little each call moves."""
        done_bytes = 0
        num_fruitless = 0
        while done_bytes < len(view):
            rest = view[done_bytes:] if done_bytes else view
            position = offset_bytes + done_bytes
            num_moved = (
                os.preadv(self._descriptor, [rest], position)
                if is_read
                else os.pwrite(self._descriptor, rest, position)
            )
            if self._staging:
                num_moved = num_moved // BLOCK_BYTES * BLOCK_BYTES  # the next call has to begin at a block again
            done_bytes += num_moved
            num_fruitless = 0 if num_moved else num_fruitless + 1
            if num_fruitless == _MAX_FRUITLESS:
                raise TierIOError(
                    f"the swap file in {str(self._scratch.directory)!r} came {'back ' if is_read else ''}short: "
                    f"{done_bytes} of {len(view)} bytes at offset {offset_bytes}"
                )


class DiskTier(PooledTier):
    """A nameless file as a tier.

    Args:
        swap_dir: Directory of the file; None means TORCHDELTA_SWAP_DIR, else the system's for temporary files.
        capacity_bytes: The most that the file may take, or None for what the disk has (`disk_budget`).
        host_budget_bytes: The most that staging may take; smaller budgets make smaller parts, and slower transfers.
        checksum: Keep a CRC-32 of every part written and compare it when the part is read. Off by default: it runs
            at a few GB/s on a core that the training could use, which is more than 2 % of a step that swaps much
            (benchmarks/checksum.py).
    """

    def __init__(
        self,
        *,
        swap_dir: str | os.PathLike[str] | None = None,
        capacity_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        checksum: bool = False,
    ) -> None:
        scratch = open_scratch_file(swap_directory(swap_dir), capacity_bytes=capacity_bytes)
        self.direct = scratch.is_direct
        self.directory = scratch.directory
        try:
            medium = DiskMedium(scratch, host_budget_bytes=host_budget_bytes, checksum=checksum)
        except BaseException as error:
            os.close(scratch.descriptor)
            if isinstance(error, OSError):
                raise TierError(f"the disk tier has no memory for staging: {error.strerror or error}") from error
            raise
        super().__init__(medium, capacity_bytes=capacity_bytes)
