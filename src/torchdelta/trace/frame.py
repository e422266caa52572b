"""The frame that trace and plan files share: gzip-compressed JSON lines, a header first and an end record last.

Text, so that `zcat step.trace | head` shows what is in it and any language reads it; lines, so that the recorder can
write while the step runs and nobody needs two copies in memory; gzip, because its checksum notices a flipped bit.

A file is written whole or not at all: see the note in whole_file.py. Its last line repeats how many records there are,
so that a file that others cut short is noticed even where the cut falls between two gzip members. What is no file (a
pipe, "/dev/null") is refused: renaming would put a file in its place.

Every failure, of the disk or of the content, is one error of one line that names the file, and the line in it where
there is one.
"""

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Union

import msgspec

from torchdelta.errors import TorchdeltaError
from torchdelta.whole_file import WholeFile

__all__ = ["FileKind", "RecordWriter", "one_line", "read_records"]

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused, so that a hostile file cannot fill the memory with one."""

_COMPRESSION_LEVEL = 3  # on the training thread: under half of the time of 6, for a file 10 % larger
_FLUSH_BYTES = 2**18
# UnicodeDecodeError: not every text in a line is decoded by msgspec's own rules. RecursionError: too deeply nested.
_UNDECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_GZIP_MAGIC = b"\x1f\x8b"


class FileKind:
    """What a file holds.

    Attributes:
        noun: Its name in messages: `"trace"`.
        format: What the field `format` of its header says.
        versions: The versions that are read, the last one being the one that is written.
        error: What is raised.
        end_since: The first version whose files have an end record.
        counted: The records between header and end, by the name that the end record counts them under.
    """

    def __init__(
        self,
        *,
        noun: str,
        format: str,  # noqa: A002 - the field's name
        versions: tuple[int, ...],
        error: type[TorchdeltaError],
        header: type[msgspec.Struct],
        counted: dict[str, type[msgspec.Struct]],
        end_since: int = 1,
    ) -> None:
        self.noun, self.format, self.versions, self.error = noun, format, versions, error
        self.counted, self.end_since = counted, end_since
        fields = [(f"num_{name}", int) for name in counted]
        options: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        self._end = msgspec.defstruct("End", fields, tag_field="record", tag="end", **options)
        records: Any = Union[(*counted.values(), self._end)]
        self.decode_header = msgspec.json.Decoder(header).decode
        self.decode_record = msgspec.json.Decoder(records).decode

    def end_of(self, num: Counter[type]) -> msgspec.Struct:
        """Return the last record of a file with so many records of each type."""
        return self._end(**{f"num_{name}": num[kind] for name, kind in self.counted.items()})

    def is_end(self, record: object) -> bool:
        """Return whether a record is the last one of a file."""
        return isinstance(record, self._end)


class _Version(msgspec.Struct, frozen=True):
    """As much of a header as every version of every format has."""

    format: str
    version: int


_encode = msgspec.json.Encoder().encode
_decode_version = msgspec.json.Decoder(_Version).decode


class RecordWriter:
    """Writes the records of a file, whole or not at all. One thread at a time.

    Args:
        path: Where the file is to appear.
        kind: What it holds.
        header: Its first record.

    Raises:
        FileKind.error: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, header: msgspec.Struct) -> None:
        self._num: Counter[type] = Counter()
        self._path, self._kind = Path(path), kind
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._is_open = True
        try:
            first_line = _encode(header)  # before there is a file
            if self._path.exists() and not (self._path.is_file() or self._path.is_dir()):
                raise kind.error(
                    f"{self._path}: cannot write the {kind.noun}: the path exists and is not a regular file"
                )
            self._file = WholeFile(path)
        except (OSError, ValueError) as error:  # ValueError: also a text that is not Unicode, and a path without a name
            raise self._failed(error) from error
        # No name and no time in the gzip header: the same lines give the same bytes.
        self._gzip = gzip.GzipFile(
            filename="", mode="wb", compresslevel=_COMPRESSION_LEVEL, fileobj=self._file.raw, mtime=0
        )
        self._put(first_line)

    def add(self, record: msgspec.Struct) -> None:
        """Append a record.

        Raises:
            FileKind.error: The file cannot be written. What was written is then gone.
        """
        try:
            line = _encode(record)
        except UnicodeEncodeError as error:
            self.abort()
            raise self._failed(error) from error
        self._put(line)
        self._num[type(record)] += 1

    def _put(self, line: bytes) -> None:
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

    def close(self) -> None:
        """Write the end record and give the file its name. Does nothing on a writer that is closed or aborted.

        Raises:
            FileKind.error: The file cannot be written. What was written is then gone.
        """
        if not self._is_open:
            return
        self._put(_encode(self._kind.end_of(self._num)))
        try:
            self._flush()
            self._gzip.close()
            self._file.close()
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
        with suppress(OSError):  # as in `WholeFile.abort`
            self._gzip.close()
        self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _flush(self) -> None:
        self._lines.append(b"")  # so that the last line ends, too
        self._gzip.write(b"\n".join(self._lines))
        self._lines.clear()
        self._lines_bytes = 0

    def _failed(self, error: OSError | ValueError) -> TorchdeltaError:
        return self._kind.error(f"{self._path}: cannot write the {self._kind.noun}: {one_line(error)}")


def read_records(path: str | os.PathLike[str], kind: FileKind) -> Iterator[tuple[int, Any]]:
    """Yield each record with the number of its line: the header first, then the others in the order of the file.

    Only the form of each record is checked. That the file is whole is known when the iterator ends without an error.
    Fields of later versions have defaults, so that in memory all is of the newest version.

    Raises:
        FileKind.error: At the first line that cannot be read.
    """
    num: Counter[type] = Counter()
    has_ended = False
    number = version = 0
    for number, line in _read_lines(path, kind):
        if has_ended:
            raise _damaged(path, kind, number, "there is a record after the end record")
        version = _check_version(path, kind, line) if number == 1 else version
        try:
            record = kind.decode_header(line) if number == 1 else kind.decode_record(line)
        except _UNDECODED as error:
            what = f"not the header of a {kind.noun}: " if number == 1 else ""
            raise _damaged(path, kind, number, f"{what}{one_line(error)}") from error
        if number == 1:
            yield number, msgspec.structs.replace(record, version=kind.versions[-1])
        elif kind.is_end(record):
            has_ended = True
            if record != (found := kind.end_of(num)):
                wrong = f"the end record announces {_in_words(record)}; the file has {_in_words(found)}"
                raise _damaged(path, kind, number, wrong)
        else:
            num[type(record)] += 1
            yield number, record
    if not has_ended and version >= kind.end_since:
        raise _damaged(path, kind, number + 1, "the file ends without an end record: it was cut short")


def _in_words(end: msgspec.Struct) -> str:
    counts = [
        f"{num} {name.removeprefix('num_').replace('_', ' ')}" for name, num in msgspec.structs.asdict(end).items()
    ]
    return f"{', '.join(counts[:-1])} and {counts[-1]}"


def _read_lines(path: str | os.PathLike[str], kind: FileKind) -> Iterator[tuple[int, bytes]]:
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
                        raise _damaged(path, kind, number, f"longer than {MAX_LINE_BYTES} bytes")
                    yield number, line
    except EOFError as error:
        raise _damaged(path, kind, number + 1, "the compressed data end too soon: the file was cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, kind, number + 1, f"the compressed data are damaged: {one_line(error)}") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a byte of 0 in it
        raise kind.error(f"{path}: cannot read the {kind.noun}: {one_line(error)}") from error
    if number == 0:
        raise kind.error(f"{path}: the file is empty")


def _check_version(path: str | os.PathLike[str], kind: FileKind, line: bytes) -> int:
    try:
        header = _decode_version(line)
    except _UNDECODED as error:
        raise _damaged(path, kind, 1, f"not the header of a {kind.noun}: {one_line(error)}") from error
    newest = kind.versions[-1]
    if header.format != kind.format:
        raise _damaged(path, kind, 1, f"not a {kind.noun}: its format is {header.format!r}, not {kind.format!r}")
    if header.version > newest:
        wrong = f"written by a newer torchdelta: format version {header.version}, this one reads {newest}"
        raise _damaged(path, kind, 1, wrong)
    if header.version not in kind.versions:
        known = ", ".join(map(str, kind.versions))
        raise _damaged(path, kind, 1, f"unknown format version {header.version}, this torchdelta reads {known}")
    return header.version


def _damaged(path: str | os.PathLike[str], kind: FileKind, line: int, wrong: str) -> TorchdeltaError:
    return kind.error(f"{path}: line {line}: {wrong}")


def one_line(error: object) -> str:
    """Return what an error says, in one line of printable characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names already
    text = " ".join(str(error).split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
