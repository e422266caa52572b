"""The file for evicted bytes. It has no name, so that the system deletes it when the process ends, even if killed.

`O_TMPFILE` creates it without a name; on file systems without that flag it is created and unlinked at once. Direct I/O
keeps the bytes out of the page cache, which would use the memory that eviction saves. An aligned test write finds out
whether the file system has direct I/O, since some accept the flag but not the write.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from torchdelta.errors import TierError

__all__ = [
    "BLOCK_BYTES",
    "ScratchFile",
    "named_directory",
    "open_nameless",
    "open_scratch_file",
    "probe",
    "set_direct",
    "swap_directory",
]

# The alignment of direct I/O in offset, length and memory address: no current disk has larger logical blocks.
BLOCK_BYTES: Final = 4096
_BLOCK: Final = b"\xa5" * BLOCK_BYTES
_PROBE_BYTES: Final = 4 << 20
_FALLBACK_BYTES_PER_S: Final = 500e6  # if there is no room for a probe
_LEAST_BYTES_PER_S: Final = 20e6
_LARGEST_BYTES_PER_S: Final = 20e9
_PREFIX: Final = "torchdelta-"
_SUFFIX: Final = ".swap"
_ABANDONED_AFTER_S: Final = 60.0
_ENVIRONMENT_NAME: Final = "TORCHDELTA_SWAP_DIR"
_REMEDY: Final = f"name another directory with swap_dir or {_ENVIRONMENT_NAME}"


class ScratchFile(NamedTuple):
    """An open unnamed file, and what a first write and read measured."""

    descriptor: int
    directory: Path
    is_direct: bool
    write_bytes_per_s: float
    read_bytes_per_s: float


def named_directory(swap_dir: str | os.PathLike[str] | None) -> Path | None:
    """Return the directory that is named, as an absolute path: the option, else TORCHDELTA_SWAP_DIR; None: neither."""
    named = os.environ.get(_ENVIRONMENT_NAME) if swap_dir is None else swap_dir
    try:
        return Path(named).absolute() if named else None
    except FileNotFoundError as error:
        msg = f"the swap directory {named!r} cannot be found, because the working directory is gone: {_REMEDY}"
        raise TierError(msg) from error


def swap_directory(swap_dir: str | os.PathLike[str] | None) -> Path:
    """Return the directory: the option, else TORCHDELTA_SWAP_DIR, else the system's temporary directory."""
    named = named_directory(swap_dir)
    if named is not None:
        return named
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise TierError(f"no directory for the swap file: {_reason(error)}; {_REMEDY}") from error


def open_scratch_file(directory: Path, *, capacity_bytes: int | None) -> ScratchFile:
    """Open an unnamed file, with direct I/O if the file system has it, and measure it for a few milliseconds.

    Args:
        directory: The directory of the file.
        capacity_bytes: The most that may be written, the probe included.

    Raises:
        TierError: The directory is missing or cannot be written.
    """
    descriptor = open_nameless(directory)
    try:
        probe_bytes = _PROBE_BYTES if capacity_bytes is None else min(_PROBE_BYTES, capacity_bytes)
        probe_bytes = probe_bytes // BLOCK_BYTES * BLOCK_BYTES
        is_direct = probe_bytes > 0 and set_direct(descriptor) and _accepts_direct(descriptor)
        if not is_direct:
            _clear_direct(descriptor)
        write_bytes_per_s, read_bytes_per_s = probe(descriptor, probe_bytes)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise TierError(
                f"the swap file in {str(directory)!r} cannot be used: {_reason(error)}; {_REMEDY}"
            ) from error
        raise
    return ScratchFile(descriptor, directory, is_direct, write_bytes_per_s, read_bytes_per_s)


def open_nameless(directory: Path) -> int:
    """Open a file of the directory that no one else can open, and that is gone with its last descriptor.

    Raises:
        TierError: The directory does not exist, or cannot be written.
    """
    try:
        # `Path.is_dir` and `Path.exists` raise where a path cannot be read: below a private directory, on a lost mount,
        # with a name that is too long.
        what = "" if stat.S_ISDIR(directory.stat().st_mode) else "is not a directory"
    except FileNotFoundError:
        what = "does not exist"
    except OSError as error:
        raise TierError(f"the swap directory {str(directory)!r} cannot be used: {_reason(error)}; {_REMEDY}") from error
    if what:
        raise TierError(f"the swap directory {str(directory)!r} {what}; create it, or {_REMEDY}")
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # the file system or the platform does not have it
        pass
    _sweep(directory)
    try:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=directory)
    except OSError as error:
        raise TierError(
            f"the swap directory {str(directory)!r} cannot be written: {_reason(error)}; {_REMEDY}"
        ) from error
    Path(path).unlink(missing_ok=True)
    return descriptor


def _sweep(directory: Path) -> None:
    """Remove the empty files of processes that were killed between creating and unlinking theirs."""
    try:
        for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
            status = path.stat()
            if status.st_size == 0 and time.time() - status.st_mtime > _ABANDONED_AFTER_S:
                path.unlink()
    except OSError:  # it belongs to another user, or is gone already
        pass


def set_direct(descriptor: int) -> bool:
    """Turn direct I/O on for a file. Return whether its file system lets it be turned on."""
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (OSError, AttributeError):
        return False
    return True


def _clear_direct(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))


def _accepts_direct(descriptor: int) -> bool:
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            return os.pwrite(descriptor, buffer, 0) == BLOCK_BYTES and os.preadv(descriptor, [buffer], 0) == BLOCK_BYTES
    except OSError:
        return False


def probe(descriptor: int, probe_bytes: int) -> tuple[float, float]:
    """Write and read once, for the first estimates; the transfers update them."""
    estimates = (_FALLBACK_BYTES_PER_S, _FALLBACK_BYTES_PER_S)
    try:
        if probe_bytes > 0:
            with mmap.mmap(-1, probe_bytes) as buffer:
                for _ in range(probe_bytes // BLOCK_BYTES):  # touch every page: a page fault would be measured as well
                    buffer.write(_BLOCK)
                os.ftruncate(descriptor, probe_bytes)
                start_s = time.perf_counter()
                num_written = os.pwrite(descriptor, buffer, 0)
                middle_s = time.perf_counter()
                num_read = os.preadv(descriptor, [buffer], 0)
                end_s = time.perf_counter()
                estimates = (_bandwidth(num_written, middle_s - start_s), _bandwidth(num_read, end_s - middle_s))
    except OSError as error:
        # Out of memory included: that may be why the tier is opened.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM}:
            raise
    os.ftruncate(descriptor, 0)
    return estimates


def _bandwidth(num_bytes: int, time_s: float) -> float:
    return min(max(num_bytes / max(time_s, 1e-9), _LEAST_BYTES_PER_S), _LARGEST_BYTES_PER_S)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
