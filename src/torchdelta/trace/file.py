"""Trace files: gzip-compressed JSON lines, written and read as a stream.

Text, so that `zcat step.trace | head` shows what is in it and any language reads it; lines, so that the recorder can
write while the step runs and nobody needs two copies in memory; gzip, because its checksum notices a flipped bit.
`docs/trace-format.md` is the reference for everybody else.

[Note: whole or not at all]
A file is written under a temporary name beside its place and renamed when its last line is out: under its own name a
trace is complete or does not exist. The last line repeats how many records there are, so that a file that others cut
short is noticed even where the cut falls between two gzip members.

Every failure, of the disk or of the content, is one `TraceFileError` of one line that names the file, and the line in
it where there is one.
"""

import gzip
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from torchdelta.errors import TraceFileError
from torchdelta.trace.model import (
    FORMAT_NAME,
    FORMAT_VERSION,
    READABLE_VERSIONS,
    Buffer,
    Header,
    Op,
    SavedTensor,
    Trace,
)
from torchdelta.trace.validate import find_fault

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused, so that a hostile file cannot fill the memory with one."""

_COMPRESSION_LEVEL = 3  # on the training thread: under half of the time of 6, for a file 10 % larger
_FLUSH_BYTES = 2**18
_GZIP_MAGIC = b"\x1f\x8b"

Record = Buffer | Op | SavedTensor
"""What stands between the header and the end."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="end", forbid_unknown_fields=True):
    """The last record of a file: how many there are of each kind.

    Attributes:
        num_buffers: Records tagged `buffer`.
        num_ops: Records tagged `op`.
        num_saved_tensors: Records tagged `saved`.
    """

    num_buffers: int
    num_ops: int
    num_saved_tensors: int


class _Version(msgspec.Struct, frozen=True):
    """As much of a header as every version of the format has."""

    format: str
    version: int


_encode = msgspec.json.Encoder().encode
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_record = msgspec.json.Decoder(Buffer | Op | SavedTensor | End).decode


class TraceWriter:
    """Writes a trace while it comes into being.

    Records go out in the order in which they are added. Ops must be added in the order of their index; buffers at any
    time, usually at their death, when all of their fields are known; saved tensors at any time, in the order in which
    autograd saved them. See [Note: whole or not at all]. Nothing is validated here: a reader does that.

    One thread at a time.

    Example:
        >>> with TraceWriter("step.trace", header) as writer:
        ...     writer.add(op)
        ...     writer.add(buffer)
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._num: dict[type[Record], int] = {Buffer: 0, Op: 0, SavedTensor: 0}
        self._is_open = True
        first_line = _encode(header)  # before there is a file: what cannot be encoded leaves none behind
        try:
            self._raw = self._temporary.open("xb")
        except OSError as error:
            raise self._failed(error) from error
        # No name and no time in the gzip header: the same trace gives the same bytes.
        self._gzip = gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION_LEVEL, fileobj=self._raw, mtime=0)
        self._put(first_line)

    def add(self, record: Record) -> None:
        """Append one record.

        Raises:
            TraceFileError: If the file cannot be written. What was written is then gone.
        """
        self._put(_encode(record))
        self._num[type(record)] += 1

    def close(self) -> None:
        """Write the end record and give the file its name. Does nothing on a writer that is closed or aborted.

        Raises:
            TraceFileError: If the file cannot be written. What was written is then gone.
        """
        if not self._is_open:
            return
        end = End(num_buffers=self._num[Buffer], num_ops=self._num[Op], num_saved_tensors=self._num[SavedTensor])
        self._put(_encode(end))
        try:
            self._flush()
            self._gzip.close()
            self._raw.close()
            self._temporary.replace(self._path)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _put(self, line: bytes) -> None:
        if not self._is_open:
            raise TraceFileError(f"{self._path}: cannot write the trace: its writer is closed")
        self._lines.append(line)
        self._lines_bytes += len(line)
        if self._lines_bytes >= _FLUSH_BYTES:
            try:
                self._flush()
            except OSError as error:
                self.abort()
                raise self._failed(error) from error

    def _flush(self) -> None:
        self._lines.append(b"")  # so that the last line ends, too
        self._gzip.write(b"\n".join(self._lines))
        self._lines.clear()
        self._lines_bytes = 0

    def _failed(self, error: OSError) -> TraceFileError:
        return TraceFileError(f"{self._path}: cannot write the trace: {_one_line(error)}")


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a whole trace: its buffers, then its ops, then its saved tensors.

    The same trace gives the same bytes on every run (of one zlib).

    Raises:
        TraceFileError: If the trace is not valid, or the file cannot be written.
    """
    fault = find_fault(trace)
    if fault is not None:
        raise TraceFileError(f"{path}: not written: {fault.message}")
    with TraceWriter(path, trace.header) as writer:
        for records in (trace.buffers, trace.ops, trace.saved_tensors):
            for record in records:
                writer.add(record)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a whole trace and validate it.

    Raises:
        TraceFileError: If the file cannot be read, is damaged, of a newer version or no trace, or its content breaks an
            invariant of the model: with the file, the line and the reason.
    """
    stream = read_records(path)
    _, header = next(stream)
    assert isinstance(header, Header)
    # Each record with its line, for the message about one that turns out to be wrong when all are known.
    buffers: list[tuple[int, Buffer]] = []
    ops: list[tuple[int, Op]] = []
    saved_tensors: list[tuple[int, SavedTensor]] = []
    for line, record in stream:
        match record:
            case Buffer():
                buffers.append((line, record))
            case Op():
                ops.append((line, record))
            case SavedTensor():
                saved_tensors.append((line, record))
            case _:
                pass
    buffers.sort(key=lambda item: item[1].id)  # written in the order of their deaths, as a rule
    trace = Trace(
        header=header,
        buffers=tuple(record for _, record in buffers),
        ops=tuple(record for _, record in ops),
        saved_tensors=tuple(record for _, record in saved_tensors),
    )
    fault = find_fault(trace)
    if fault is None:
        return trace
    lines = {
        "header": [1],
        "buffer": [line for line, _ in buffers],
        "op": [line for line, _ in ops],
        "saved": [line for line, _ in saved_tensors],
    }
    raise TraceFileError(f"{path}: line {lines[fault.record][fault.index]}: {_one_line(fault.message)}")


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read where a trace comes from, and nothing else of the file.

    Raises:
        TraceFileError: If the file's first line cannot be read or is not a header of a known version.
    """
    _, header = next(read_records(path))
    assert isinstance(header, Header)
    return header


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, Header | Record]]:
    """Yield each record with the number of its line: the header first, then the others in the order of the file.

    Only the form of each record is checked; `read_trace` also looks at how they fit together. That the file is whole is
    known when the iterator ends without an error.

    Raises:
        TraceFileError: At the first line that cannot be read.
    """
    num: dict[type[Record], int] = {Buffer: 0, Op: 0, SavedTensor: 0}
    end: End | None = None
    number = 0
    for number, line in _lines(path):
        if number == 1:
            yield number, _header(path, line)
            continue
        if end is not None:
            raise _damaged(path, number, "there is a record after the end record")
        try:
            record = _decode_record(line)
        # UnicodeDecodeError: not every text in a line is decoded by msgspec's own rules.
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, number, _one_line(error)) from error
        if isinstance(record, End):
            end = record
            found = End(num_buffers=num[Buffer], num_ops=num[Op], num_saved_tensors=num[SavedTensor])
            if end != found:
                wrong = f"the end record announces {_in_words(end)}; the file has {_in_words(found)}"
                raise _damaged(path, number, wrong)
        else:
            num[type(record)] += 1
            yield number, record
    if number == 0:
        raise TraceFileError(f"{path}: the file is empty")
    if end is None:
        raise _damaged(path, number + 1, "the file ends without an end record: it was cut short")


def _header(path: str | os.PathLike[str], line: bytes) -> Header:
    try:
        version = _decode_version(line)
        if version.format != FORMAT_NAME:
            raise _damaged(path, 1, f"not a trace: its format is {version.format!r}, not {FORMAT_NAME!r}")
        if version.version > FORMAT_VERSION:
            wrong = f"written by a newer torchdelta: format version {version.version}, this one reads {FORMAT_VERSION}"
            raise _damaged(path, 1, wrong)
        if version.version not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            raise _damaged(path, 1, f"unknown format version {version.version}, this torchdelta reads {known}")
        # Fields of later versions have defaults, so that in memory every trace is of the newest version.
        return msgspec.structs.replace(_decode_header(line), version=FORMAT_VERSION)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, 1, f"not the header of a trace: {_one_line(error)}") from error


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a gzip file with their numbers from 1, and turn each way to fail into our error."""
    number = 0
    try:
        with Path(path).open("rb") as raw:
            magic = raw.read(len(_GZIP_MAGIC))
            if not magic:
                return
            if magic != _GZIP_MAGIC:
                raise TraceFileError(f"{path}: not a trace: the file is not gzip-compressed")
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                while line := stream.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise _damaged(path, number, f"longer than {MAX_LINE_BYTES} bytes")
                    yield number, line
    except EOFError as error:
        raise _damaged(path, number + 1, "the compressed data end too soon: the file was cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, number + 1, f"the compressed data are damaged: {_one_line(error)}") from error
    except OSError as error:
        raise TraceFileError(f"{path}: cannot read the trace: {_one_line(error)}") from error


def _damaged(path: str | os.PathLike[str], line: int, wrong: str) -> TraceFileError:
    return TraceFileError(f"{path}: line {line}: {wrong}")


def _in_words(end: End) -> str:
    return f"{end.num_buffers} buffers, {end.num_ops} ops and {end.num_saved_tensors} saved tensors"


def _one_line(error: object) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names already
    text = " ".join(str(error).split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
