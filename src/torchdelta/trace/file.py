"""Trace files: the header, then buffers, ops and saved tensors, in the frame of `trace/frame.py`.

`docs/trace-format.md` is the reference for everybody else. Every failure is a `TraceFileError`.
"""

import os
from collections.abc import Iterator

from torchdelta.errors import TraceFileError
from torchdelta.trace import frame
from torchdelta.trace.model import FORMAT_NAME, READABLE_VERSIONS, Buffer, Header, Op, SavedTensor, Trace
from torchdelta.trace.validate import find_fault

_KIND = frame.FileKind(
    noun="trace",
    format=FORMAT_NAME,
    versions=READABLE_VERSIONS,
    error=TraceFileError,
    header=Header,
    counted={"buffers": Buffer, "ops": Op, "saved_tensors": SavedTensor},
)

Record = Buffer | Op | SavedTensor
"""What stands between the header and the end."""


class TraceWriter(frame.RecordWriter):
    """Writes a trace while it comes into being.

    Records go out in the order in which they are added. Ops must be added in the order of their index; buffers at any
    time, usually at their death, when all of their fields are known; saved tensors at any time, in the order in which
    autograd saved them. See [Note: whole or not at all] in whole_file.py. Nothing is validated: a reader does that.

    Example:
        >>> with TraceWriter("step.trace", header) as writer:
        ...     writer.add(op)
        ...     writer.add(buffer)
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        super().__init__(path, _KIND, header)


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
    raise TraceFileError(f"{path}: line {lines[fault.record][fault.index]}: {frame.one_line(fault.message)}")


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
    return frame.read_records(path, _KIND)
