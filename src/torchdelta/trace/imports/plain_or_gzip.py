"""Reads the files of other programs, gzip-compressed or not."""

import gzip
import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchdelta.errors import TraceFileError

__all__ = ["opened", "read_whole"]

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def opened(path: str | os.PathLike[str], noun: str) -> Generator[io.BufferedIOBase]:
    """Open a file to read it; `noun` names it in messages.

    Raises:
        TraceFileError: It cannot be opened, or not be read inside of the context.
    """
    try:
        with Path(path).open("rb") as raw:
            is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            yield gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw
    except (OSError, EOFError, zlib.error) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceFileError(f"{path}: cannot read the {noun}: {text}") from error


def read_whole(path: str | os.PathLike[str], noun: str, *, max_bytes: int) -> bytes:
    """Return what a file holds.

    Raises:
        TraceFileError: It cannot be read, or is larger than `max_bytes` when decompressed.
    """
    with opened(path, noun) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TraceFileError(f"{path}: the {noun} is larger than {max_bytes} bytes: record fewer steps")
    return data
