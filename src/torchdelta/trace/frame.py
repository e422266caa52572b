"""The frame that trace and plan files share: gzip-compressed JSON lines, a header first and an end record last.

Text, so that `zcat step.trace | head` shows what is in it and any language reads it; lines, so that the recorder can
write while the step runs and nobody needs two copies in memory; gzip, because its checksum notices a flipped bit.

[Note: whole or not at all]
A file is written under a temporary name beside its place and renamed when its last line is out: under its own name it
is complete or does not exist. The last line repeats how many records there are, so that a file that others cut short is
noticed even where the cut falls between two gzip members. A link is followed, as `open` would, and what is no file (a
pipe, "/dev/null") is refused: renaming would put a file in its place.

Every failure, of the disk or of the content, is one error of one line that names the file, and the line in it where
there is one.
"""

import gzip
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from torchdelta.errors import TorchdeltaError

__all__ = ["FileKind", "LineWriter", "check_version", "damaged", "one_line", "read_lines"]

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused, so that a hostile file cannot fill the memory with one."""

_COMPRESSION_LEVEL = 3  # on the training thread: under half of the time of 6, for a file 10 % larger
_FLUSH_BYTES = 2**18
_GZIP_MAGIC = b"\x1f\x8b"


class FileKind(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds.

    Attributes:
        noun: Its name in messages: `"trace"`.
        format: What the field `format` of its header says.
        versions: The versions that are read, the last one being the one that is written.
        error: What is raised.
    """

    noun: str
    format: str
    versions: tuple[int, ...]
    error: type[TorchdeltaError]


class _Version(msgspec.Struct, frozen=True):
    """As much of a header as every version of every format has."""

    format: str
    version: int


_decode_version = msgspec.json.Decoder(_Version).decode


class LineWriter:
    """Writes the lines of a file. See [Note: whole or not at all]. One thread at a time.

    Args:
        path: Where the file is to appear.
        kind: What it holds.
        header: Its first line.

    Raises:
        FileKind.error: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, header: bytes) -> None:
        self._path, self._kind = Path(path), kind
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._is_open = True
        self._target = Path(os.path.realpath(path))
        if self._target.exists() and not (self._target.is_file() or self._target.is_dir()):
            raise kind.error(f"{self._path}: cannot write the {kind.noun}: it is there, and no file")
        try:
            # `with_name` refuses a path that has no last part, such as "/".
            self._temporary = self._target.with_name(f".{self._target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
            self._raw = self._temporary.open("xb")
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        # No name and no time in the gzip header: the same lines give the same bytes.
        self._gzip = gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION_LEVEL, fileobj=self._raw, mtime=0)
        self.put(header)

    def put(self, line: bytes) -> None:
        """Append a line.

        Raises:
            FileKind.error: The file cannot be written. What was written is then gone.
        """
        if not self._is_open:
            raise self._kind.error(f"{self._path}: cannot write the {self._kind.noun}: its writer is closed")
        self._lines.append(line)
        self._lines_bytes += len(line)
        if self._lines_bytes >= _FLUSH_BYTES:
            try:
                self._flush()
            except OSError as error:
                self.abort()
                raise self._failed(error) from error

    def close(self, end: bytes) -> None:
        """Write the last line and give the file its name. Does nothing on a writer that is closed or aborted.

        Raises:
            FileKind.error: The file cannot be written. What was written is then gone.
        """
        if not self._is_open:
            return
        self.put(end)
        try:
            self._flush()
            self._gzip.close()
            self._raw.close()
            self._temporary.replace(self._target)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error
        self._is_open = False

    def abort(self) -> None:
        """Drop what was written. Does nothing on a writer that is closed or aborted."""
        if not self._is_open:
            return
        self._is_open = False
        self._lines.clear()
        # Closing flushes, which on a full disk fails again: the first failure is the one to tell.
        with suppress(OSError):
            self._gzip.close()
        with suppress(OSError):
            self._raw.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._lines.append(b"")  # so that the last line ends, too
        self._gzip.write(b"\n".join(self._lines))
        self._lines.clear()
        self._lines_bytes = 0

    def _failed(self, error: OSError | ValueError) -> TorchdeltaError:
        return self._kind.error(f"{self._path}: cannot write the {self._kind.noun}: {one_line(error)}")


def read_lines(path: str | os.PathLike[str], kind: FileKind) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers from 1.

    Raises:
        FileKind.error: At whatever cannot be read.
    """
    number = 0
    try:
        with Path(path).open("rb") as raw:
            magic = raw.read(len(_GZIP_MAGIC))
            if not magic:
                raise kind.error(f"{path}: the file is empty")
            if magic != _GZIP_MAGIC:
                raise kind.error(f"{path}: not a {kind.noun}: the file is not gzip-compressed")
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                while line := stream.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise damaged(path, kind, number, f"longer than {MAX_LINE_BYTES} bytes")
                    yield number, line
    except EOFError as error:
        raise damaged(path, kind, number + 1, "the compressed data end too soon: the file was cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, kind, number + 1, f"the compressed data are damaged: {one_line(error)}") from error
    except OSError as error:
        raise kind.error(f"{path}: cannot read the {kind.noun}: {one_line(error)}") from error
    if number == 0:
        raise kind.error(f"{path}: the file is empty")


def check_version(path: str | os.PathLike[str], kind: FileKind, line: bytes) -> int:
    """Return the version that the first line of a file names.

    Raises:
        FileKind.error: It is no header, one of another format, or of a version that is not read.
    """
    try:
        header = _decode_version(line)
    # UnicodeDecodeError: not every text in a line is decoded by msgspec's own rules.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(path, kind, 1, f"not the header of a {kind.noun}: {one_line(error)}") from error
    newest = kind.versions[-1]
    if header.format != kind.format:
        raise damaged(path, kind, 1, f"not a {kind.noun}: its format is {header.format!r}, not {kind.format!r}")
    if header.version > newest:
        wrong = f"written by a newer torchdelta: format version {header.version}, this one reads {newest}"
        raise damaged(path, kind, 1, wrong)
    if header.version not in kind.versions:
        known = ", ".join(map(str, kind.versions))
        raise damaged(path, kind, 1, f"unknown format version {header.version}, this torchdelta reads {known}")
    return header.version


def damaged(path: str | os.PathLike[str], kind: FileKind, line: int, wrong: str) -> TorchdeltaError:
    """Return the error that says what is wrong with a line."""
    return kind.error(f"{path}: line {line}: {wrong}")


def one_line(error: object) -> str:
    """Return what an error says, in one line of printable characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names already
    text = " ".join(str(error).split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
