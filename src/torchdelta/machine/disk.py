"""How fast a directory's disk takes and gives back large blocks. Needs no torch."""

import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from torchdelta.errors import MachineError
from torchdelta.units import format_bytes

__all__ = ["NUM_DISK_ROUNDS", "NUM_LATENCY_READS", "DiskRates", "disk_rates"]

NUM_DISK_ROUNDS: Final = 3
NUM_LATENCY_READS: Final = 32

_CHUNK_BYTES: Final = 4 << 20
_BLOCK_BYTES: Final = 4096


class DiskRates(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        write_bytes_per_s: Rate of large writes, until the disk has them, the best of NUM_DISK_ROUNDS.
        read_bytes_per_s: Rate of large reads, the best of as many.
        latency_s: Time of reading one block of 4 KiB, median of NUM_LATENCY_READS.
        free_bytes: Room in the directory's file system.
        is_direct: Whether the page cache was left out.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    free_bytes: int
    is_direct: bool


def disk_rates(directory: Path, *, size_bytes: int) -> DiskRates:
    """Write and read a file without a name.

    Args:
        directory: Where; the file is gone when this returns, however it returns.
        size_bytes: Of the file, rounded to chunks of 4 MiB; at most a quarter of the room that is left is used.

    Raises:
        MachineError: The directory cannot be written, or has no room.
    """
    try:
        free_bytes = shutil.disk_usage(directory).free
        num_chunks = min(size_bytes, free_bytes // 4) // _CHUNK_BYTES
        if not num_chunks:
            needed = format_bytes(4 * _CHUNK_BYTES)
            free = format_bytes(free_bytes)
            raise MachineError(f"no room to measure in {str(directory)!r}: {free} are free, {needed} are needed")
        # mmap: direct I/O wants an aligned buffer. Random content, so that nothing is compressed on the way.
        with tempfile.TemporaryFile(dir=directory) as file, mmap.mmap(-1, _CHUNK_BYTES) as chunk:
            chunk.write(os.urandom(_CHUNK_BYTES))
            is_direct = _set_direct(file.fileno(), chunk)
            with memoryview(chunk) as view:
                writes_s = [_write(file.fileno(), view, num_chunks) for _ in range(NUM_DISK_ROUNDS)]
                if not is_direct:
                    _forget(file.fileno())
                reads_s = [_read(file.fileno(), view, num_chunks) for _ in range(NUM_DISK_ROUNDS)]
                with view[:_BLOCK_BYTES] as block:
                    latency_s = statistics.median(_read(file.fileno(), block, 1) for _ in range(NUM_LATENCY_READS))
    except OSError as error:
        raise MachineError(f"the disk of {str(directory)!r} cannot be measured: {error.strerror or error}") from error
    total_bytes = num_chunks * _CHUNK_BYTES
    return DiskRates(
        write_bytes_per_s=total_bytes / min(writes_s),
        read_bytes_per_s=total_bytes / min(reads_s),
        latency_s=latency_s,
        free_bytes=free_bytes,
        is_direct=is_direct,
    )


def _write(descriptor: int, view: memoryview, num_chunks: int) -> float:
    start_s = time.perf_counter()
    for chunk in range(num_chunks):
        if os.pwrite(descriptor, view, chunk * len(view)) != len(view):
            raise OSError("a write came back short")
    os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)
    return time.perf_counter() - start_s


def _read(descriptor: int, view: memoryview, num_chunks: int) -> float:
    start_s = time.perf_counter()
    for chunk in range(num_chunks):
        if os.preadv(descriptor, [view], chunk * len(view)) != len(view):
            raise OSError("a read came back short")
    return time.perf_counter() - start_s


def _set_direct(descriptor: int, chunk: mmap.mmap) -> bool:
    """Leave the page cache out, if the file system can: some accept the flag and then fail to write."""
    try:
        import fcntl

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (ImportError, AttributeError, OSError):
        return False
    try:
        with memoryview(chunk) as view, view[:_BLOCK_BYTES] as block:
            os.pwrite(descriptor, block, 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _forget(descriptor: int) -> None:
    """Ask the kernel to drop what it caches of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
