"""Trace files: the header, then buffers, ops and saved tensors, in the frame of `trace/frame.py`.

`docs/trace-format.md` is the reference for everybody else. Every failure is a `TraceFileError`.
"""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from torchdelta.errors import TraceFileError
from torchdelta.trace.frame import FileKind, LineWriter, check_version, damaged, one_line, read_lines
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

_KIND = FileKind(noun="trace", format=FORMAT_NAME, versions=READABLE_VERSIONS, error=TraceFileError)

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


_encode = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_record = msgspec.json.Decoder(Buffer | Op | SavedTensor | End).decode


class TraceWriter:
    """Writes a trace while it comes into being.

    Records go out in the order in which they are added. Ops must be added in the order of their index; buffers at any
    time, usually at their death, when all of their fields are known; saved tensors at any time, in the order in which
    autograd saved them. See [Note: whole or not at all] in frame.py. Nothing is validated here: a reader does that.

    One thread at a time.

    Example:
        >>> with TraceWriter("step.trace", header) as writer:
        ...     writer.add(op)
        ...     writer.add(buffer)
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._num: dict[type[Record], int] = {Buffer: 0, Op: 0, SavedTensor: 0}
        self._writer = LineWriter(path, _KIND, _encode(header))

    def add(self, record: Record) -> None:
        """Append one record.

        Raises:
            TraceFileError: If the file cannot be written. What was written is then gone.
        """
        self._writer.put(_encode(record))
        self._num[type(record)] += 1

    def close(self) -> None:
        """Write the end record and give the file its name. Does nothing on a writer that is closed or aborted.

        Raises:
            TraceFileError: If the file cannot be written. What was written is then gone.
        """
        end = End(num_buffers=self._num[Buffer], num_ops=self._num[Op], num_saved_tensors=self._num[SavedTensor])
        self._writer.close(_encode(end))

    def abort(self) -> None:
        """Drop what was written. Does nothing on a writer that is closed or aborted."""
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


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
    raise TraceFileError(f"{path}: line {lines[fault.record][fault.index]}: {one_line(fault.message)}")


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
    for number, line in read_lines(path, _KIND):
        if number == 1:
            yield number, _header(path, line)
            continue
        if end is not None:
            raise damaged(path, _KIND, number, "there is a record after the end record")
        try:
            record = _decode_record(line)
        # UnicodeDecodeError: not every text in a line is decoded by msgspec's own rules.
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise damaged(path, _KIND, number, one_line(error)) from error
        if isinstance(record, End):
            end = record
            found = End(num_buffers=num[Buffer], num_ops=num[Op], num_saved_tensors=num[SavedTensor])
            if end != found:
                wrong = f"the end record announces {_in_words(end)}; the file has {_in_words(found)}"
                raise damaged(path, _KIND, number, wrong)
        else:
            num[type(record)] += 1
            yield number, record
    if end is None:
        raise damaged(path, _KIND, number + 1, "the file ends without an end record: it was cut short")


def _header(path: str | os.PathLike[str], line: bytes) -> Header:
    check_version(path, _KIND, line)
    try:
        # Fields of later versions have defaults, so that in memory every trace is of the newest version.
        return msgspec.structs.replace(_decode_header(line), version=FORMAT_VERSION)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(path, _KIND, 1, f"not the header of a trace: {one_line(error)}") from error


def _in_words(end: End) -> str:
    return f"{end.num_buffers} buffers, {end.num_ops} ops and {end.num_saved_tensors} saved tensors"
