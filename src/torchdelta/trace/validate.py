"""The invariants of a trace, and the first place where one is broken.

Planners, simulator, pool and runtime rely on them without looking again, so whatever makes a trace, or reads one from a
file, checks it once. Linear in the records and their reads and writes, but for a sort of the buffers.

What must hold, beside ids and numbers in range:

1.  Ops and buffers are dense and in order: each stands at the place that its index or id names.
2.  A life is not empty: `death_op > birth_op`.
3.  Op `i` writes exactly the buffers with `birth_op == i`.
4.  Versions of a storage follow one another: no overlap, no gap ([Note: versions of a storage] in `model.py`).
5.  An op reads what was written before it and is still alive or overwritten by that very op. So reads form no cycle.
6.  A saved tensor is a view that lies within its buffer, which was alive when it was packed; a buffer is marked `saved`
    if, and only if, a saved tensor names it.
"""

import math
from itertools import accumulate, pairwise
from typing import Literal

import msgspec
from msgspec.structs import asdict

from torchdelta.errors import TraceFileError
from torchdelta.trace.model import BEFORE_STEP, FORMAT_NAME, FORMAT_VERSION, Op, SavedTensor, Trace, storage_versions

ITEM_SIZE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element by dtype name. A dtype that is not listed is accepted, but its views' bounds are not checked."""

MAX_BYTES = 2**62
"""What all buffers of a trace, or all workspaces, may come to together: its readers add up 64-bit integers."""


MAX_COUNT = 2**100
"""What an op may multiply or move, and what a size of its product may be: the price that is made of them is a float."""

MAX_TIME_S = 1e30
"""What all ops may take together, so that a plan which runs each of them for each other one has a time."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing found wrong with a trace.

    Attributes:
        record: The tag of the record at fault.
        index: Its place in the trace: buffer id, op index, position among the saved tensors; 0 for the header.
        message: What is wrong, in one line, the record named in it.
    """

    record: Literal["header", "buffer", "op", "saved"]
    index: int
    message: str


def validate(trace: Trace) -> None:
    """Check every invariant of a trace.

    Raises:
        TraceFileError: With one line that names the record and what is wrong with it.
    """
    fault = find_fault(trace)
    if fault is not None:
        raise TraceFileError(fault.message)


def find_fault(trace: Trace) -> Fault | None:
    """Return the first violation of an invariant, None if the trace is valid."""
    # The order matters: each check may index with what the ones before it have proved to be in range.
    return (
        _header_fault(trace)
        or _buffer_fault(trace)
        or _op_fault(trace)
        or _birth_fault(trace)
        or _version_fault(trace)
        or _read_fault(trace)
        or _saved_fault(trace)
    )


def _header_fault(trace: Trace) -> Fault | None:
    header = trace.header
    if header.format != FORMAT_NAME:
        message = f"header: format is {header.format!r}, not {FORMAT_NAME!r}"
    elif header.version != FORMAT_VERSION:
        message = f"header: format version is {header.version}; this torchdelta knows version {FORMAT_VERSION}"
    elif header.batch_size is not None and header.batch_size < 0:
        message = f"header: negative batch_size {header.batch_size}"
    elif not trace.ops:
        message = "header: the trace has no ops, so it is not a training step"
    else:
        return None
    return Fault(record="header", index=0, message=message)


def _buffer_fault(trace: Trace) -> Fault | None:
    num_ops = len(trace.ops)
    for place, buffer in enumerate(trace.buffers):
        if buffer.id != place:
            wrong = f"ids must be dense and in order, {place} expected"
        elif buffer.storage_id < 0:
            wrong = f"negative storage_id {buffer.storage_id}"
        elif buffer.size_bytes < 0:
            wrong = f"negative size_bytes {buffer.size_bytes}"
        elif buffer.birth_op < BEFORE_STEP or buffer.birth_op >= num_ops:
            wrong = f"birth_op {buffer.birth_op} is outside of the step's {num_ops} ops"
        elif buffer.death_op <= buffer.birth_op:
            wrong = f"negative or empty life, death_op {buffer.death_op} is not above birth_op {buffer.birth_op}"
        elif buffer.death_op > num_ops:
            wrong = f"death_op {buffer.death_op} is outside of the step's {num_ops} ops"
        else:
            continue
        return Fault(record="buffer", index=place, message=f"buffer {buffer.id}: {wrong}")
    return _sum_fault("buffer", [buffer.size_bytes for buffer in trace.buffers])


def _sum_fault(record: Literal["buffer", "op"], sizes_bytes: list[int]) -> Fault | None:
    """Find the record with which the sizes pass what 64-bit integers add up."""
    for place, total_bytes in enumerate(accumulate(sizes_bytes)):
        if total_bytes > MAX_BYTES:
            noun = "buffers" if record == "buffer" else "workspaces"
            message = f"{record} {place}: with it the {noun} come to more than 4 EiB ({MAX_BYTES} bytes)"
            return Fault(record=record, index=place, message=message)
    return None


def _op_fault(trace: Trace) -> Fault | None:
    num_buffers = len(trace.buffers)
    phases = trace.header.phases
    for place, op in enumerate(trace.ops):
        if op.index != place:
            wrong = f"ops must be dense and in order, {place} expected"
        elif op.phase not in phases:
            wrong = f"phase {op.phase!r} is not among the header's phases {', '.join(phases)}"
        elif not (math.isfinite(op.time_s) and op.time_s >= 0):
            wrong = f"time_s {op.time_s} is not a finite number of seconds from 0"
        elif count_fault := _count_fault(op):
            wrong = count_fault
        elif unknown := [id_ for id_ in (*op.reads, *op.writes) if not 0 <= id_ < num_buffers]:
            wrong = f"unknown buffer {unknown[0]}, the trace has {num_buffers}"
        elif len(set(op.reads)) < len(op.reads) or len(set(op.writes)) < len(op.writes):
            wrong = "the same buffer twice in its reads or twice in its writes"
        else:
            continue
        return Fault(record="op", index=place, message=f"op {op.index} {op.name!r}: {wrong}")
    return _sum_fault("op", [op.workspace_bytes for op in trace.ops]) or _time_fault(trace)


def _count_fault(op: Op) -> str | None:
    counts = {"workspace_bytes": op.workspace_bytes, "flops": op.flops, "moved_bytes": op.moved_bytes}
    if op.product is not None:
        counts |= {f"product.{name}": size for name, size in asdict(op.product).items()}
    for name, count in counts.items():
        if count < 0:
            return f"negative {name} {count}"
        if count > MAX_COUNT:
            return f"{name} is above {MAX_COUNT}"
    return None


def _time_fault(trace: Trace) -> Fault | None:
    for place, total_s in enumerate(accumulate(op.time_s for op in trace.ops)):
        if total_s > MAX_TIME_S:
            message = f"op {place}: with it the ops take more than {MAX_TIME_S:g} seconds"
            return Fault(record="op", index=place, message=message)
    return None


def _birth_fault(trace: Trace) -> Fault | None:
    """Find an op that writes what is born elsewhere, or a buffer that nobody wrote."""
    num_writers = [0] * len(trace.buffers)
    for op in trace.ops:
        for id_ in op.writes:
            birth_op = trace.buffers[id_].birth_op
            if birth_op != op.index:
                born = "before the step" if birth_op == BEFORE_STEP else f"at op {birth_op}"
                message = f"op {op.index} {op.name!r}: writes buffer {id_}, which is born {born}"
                return Fault(record="op", index=op.index, message=message)
            num_writers[id_] += 1
    for buffer in trace.buffers:
        if buffer.birth_op != BEFORE_STEP and not num_writers[buffer.id]:
            message = f"buffer {buffer.id}: born at op {buffer.birth_op}, which does not write it"
            return Fault(record="buffer", index=buffer.id, message=message)
    return None


def _version_fault(trace: Trace) -> Fault | None:
    for storage_id, buffers in storage_versions(trace).items():
        for old, new in pairwise(buffers):
            if old.death_op == new.birth_op:
                continue
            relation = "overlap" if old.death_op > new.birth_op else "leave a gap"
            message = (
                f"buffer {new.id}: versions {old.id} and {new.id} of storage {storage_id} {relation}, one dies at op "
                f"{old.death_op} and the next is born at {new.birth_op}"
            )
            return Fault(record="buffer", index=new.id, message=message)
    return None


def _read_fault(trace: Trace) -> Fault | None:
    """Find a read of content that is not there (or not yet): this also excludes cycles."""
    buffers = trace.buffers
    for op in trace.ops:
        overwritten: set[int] | None = None
        for id_ in op.reads:
            buffer = buffers[id_]
            if buffer.birth_op < op.index < buffer.death_op:
                continue
            if buffer.birth_op >= op.index:
                wrong = f"reads buffer {id_} before its birth at op {buffer.birth_op}"
            else:
                # See [Note: versions of a storage] in model.py: an op may read what it overwrites.
                if overwritten is None:
                    overwritten = {buffers[written].storage_id for written in op.writes}
                if buffer.death_op == op.index and buffer.storage_id in overwritten:
                    continue
                wrong = f"reads buffer {id_} after its death at op {buffer.death_op}"
            return Fault(record="op", index=op.index, message=f"op {op.index} {op.name!r}: {wrong}")
    return None


def _saved_fault(trace: Trace) -> Fault | None:
    saved_ids: set[int] = set()
    for place, saved in enumerate(trace.saved_tensors):
        wrong = _saved_view_fault(saved, trace)
        if wrong is not None:
            return Fault(record="saved", index=place, message=f"saved tensor {place}: {wrong}")
        saved_ids.add(saved.buffer_id)
    for buffer in trace.buffers:
        if buffer.saved != (buffer.id in saved_ids):
            wrong = "marked as saved, but no saved tensor names it" if buffer.saved else "saved, but not marked so"
            return Fault(record="buffer", index=buffer.id, message=f"buffer {buffer.id}: {wrong}")
    return None


def _saved_view_fault(saved: SavedTensor, trace: Trace) -> str | None:
    if not 0 <= saved.op <= len(trace.ops):
        return f"op {saved.op} is outside of the step's {len(trace.ops)} ops"
    if not 0 <= saved.buffer_id < len(trace.buffers):
        return f"unknown buffer {saved.buffer_id}, the trace has {len(trace.buffers)}"
    buffer = trace.buffers[saved.buffer_id]
    if not buffer.birth_op <= saved.op <= buffer.death_op:
        return f"saved at op {saved.op}, but buffer {buffer.id} lives from op {buffer.birth_op} to {buffer.death_op}"
    if len(saved.shape) != len(saved.stride):
        return f"{len(saved.shape)} dimensions but {len(saved.stride)} strides"
    if min((saved.offset, *saved.shape, *saved.stride)) < 0:
        return f"negative shape, stride or offset: {saved.shape}, {saved.stride}, {saved.offset}"
    item_size_bytes = ITEM_SIZE_BYTES.get(saved.dtype)
    if item_size_bytes is None or 0 in saved.shape:
        return None
    last = saved.offset + sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride, strict=True))
    end_bytes = (last + 1) * item_size_bytes
    if end_bytes > buffer.size_bytes:
        return f"its view ends at byte {end_bytes}, but buffer {buffer.id} has {buffer.size_bytes} bytes"
    return None
