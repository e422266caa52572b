"""The trace: all ops of one training step in order, with the buffers they read and write.

Everything else speaks this model: the runtime's recorder writes it, planners, simulator, pool and report read it. It is
what a stranger needs to simulate the step again, and no more; `docs/trace-format.md` describes its file.

Time is the op index. Op `i` runs at moment `i`; a buffer is alive at the moments `birth_op <= i < death_op`.

[Note: versions of a storage]
A storage is one allocation. A *buffer* is one version of its content: an op that writes in place makes a new buffer in
the same storage, and views are metadata on a buffer, never buffers. Versions of a storage follow one another without a
gap: where op `i` overwrites buffer `a` and so makes `b`, `a.death_op == i == b.birth_op`. At moment `i` the allocation
is therefore counted once, as `b`, although op `i` may still read `a`: this is the one case in which an op reads a
buffer whose `death_op` is its own index.

[Note: what no op made]
`birth_op == -1` means alive before the step: parameters, optimizer states, usually the inputs. Content that turns up
in mid-step without a recorded op (a batch from the loader, an array that numpy filled, a gradient that the engine adds
up between two ops) is written by a pseudo-op whose name starts with `torchdelta.`, for example `torchdelta.external`
or `torchdelta.accumulate`. So every buffer that is born in the step is among the `writes` of exactly one op.

The classes are `msgspec.Struct`s and not dataclasses: they are built in a fifth of the time, which the recorder pays
for on every op, and decode from the file with their types checked.
"""

import math
from collections import Counter
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from torchdelta.errors import TraceFileError

FORMAT_NAME = "torchdelta-trace"
FORMAT_VERSION = 1

BEFORE_STEP = -1
"""The `birth_op` of a buffer that is alive before the first op."""

Phase = Literal["forward", "backward", "optimizer"]

BufferKind = Literal["parameter", "gradient", "optimizer_state", "input", "activation", "temporary", "constant"]
"""What a buffer is for.

`parameter`, `gradient` (what `.grad` holds) and `optimizer_state` are the model's own; `input` is the batch; `constant`
is anything else that the step finds (batch-norm statistics, tables); `activation` is born in forward; `temporary` is
anything else born in the step, such as the gradients of activations. A version has the kind of its storage's owner: a
parameter that the optimizer has just updated is a `parameter`.
"""

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


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="header", forbid_unknown_fields=True):
    """Where a trace comes from. The first record of a file.

    Attributes:
        format: Always `FORMAT_NAME`.
        version: Version of the format; a reader refuses a newer one than its own.
        torch_version: `torch.__version__` of the process that ran the step, such as `"2.13.0+cpu"`.
        device: Type of the device whose memory is traced: `"cpu"`, `"cuda"`.
        device_name: Its model in words, `""` if unknown.
        created_by: Who wrote the file, such as `"torchdelta 0.1.0 recorder"`.
        phases: The phases that the creator recorded, in the order of a step. An op of any other phase is an error.
        batch_size: Samples in the batch; None if unknown or meaningless.
        comment: Free text, such as the model's name.
    """

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    torch_version: str
    device: str
    device_name: str = ""
    created_by: str
    phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
    batch_size: int | None = None
    comment: str = ""


class Buffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="buffer", forbid_unknown_fields=True, gc=False
):
    """One version of the content of one storage. See [Note: versions of a storage].

    Attributes:
        id: Dense from 0: `trace.buffers[id].id == id`.
        storage_id: The storage that holds it. Never used again for another storage, even at the same address.
        size_bytes: Bytes of the whole storage, 0 allowed; not of one view of it.
        kind: What it is for.
        birth_op: Index of the op that wrote it, `BEFORE_STEP` if it was alive before the step.
        death_op: Index of the first op at which it is no longer alive: one more than the op after which its storage
            was freed, or the op that overwrote it, or `num_ops` if it outlives the step. Always above `birth_op`.
        saved: Whether autograd saved it for backward: then at least one `SavedTensor` names it.
    """

    id: int
    storage_id: int
    size_bytes: int
    kind: BufferKind
    birth_op: int
    death_op: int
    saved: bool = False


class Op(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="op", forbid_unknown_fields=True, gc=False):
    """One op that ran. Ops that only make a view neither read nor write content and need not be recorded.

    Attributes:
        index: Position in the step, dense from 0.
        name: Overload name, such as `"aten.mm.default"`. See [Note: what no op made] for the names of pseudo-ops.
        phase: The part of the step that it ran in.
        module: Path of the innermost module that was running, such as `"transformer.h.0.attn"`; `""` outside of all.
        reads: Ids of the buffers whose content it needs, each once: the overwritten version too, unless all of that is
            overwritten unseen (`copy_`, `zero_`).
        writes: Ids of the buffers that it made, each once: in fresh storages or as new versions of old ones, hidden
            writes (batch-norm statistics) included.
        time_s: Seconds that it took on the device, 0.0 if not measured.
        random: Whether it drew from a random generator.
        recomputable: Whether a second run from the same inputs (and generator state, if `random`) is known to give the
            same bits.
        workspace_bytes: The most that it allocated inside itself beside its outputs and freed again; also the extra
            bytes of a storage that it grew and had to hold twice. 0 if none or unknown.
        node: Name of the autograd node that called it, such as `"MmBackward0"`; `""` outside of backward.
    """

    index: int
    name: str
    phase: Phase
    module: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    time_s: float = 0.0
    random: bool = False
    recomputable: bool = False
    workspace_bytes: int = 0
    node: str = ""


class SavedTensor(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="saved", forbid_unknown_fields=True, gc=False
):
    """A view of a buffer that autograd kept for backward.

    Attributes:
        op: Index of the op that was next to run when autograd packed it, `num_ops` if none followed. An op's inputs are
            packed before the op runs (so `op` is its index), its outputs after it (so `op` is one more).
        buffer_id: The buffer whose content backward reads: where an op overwrites what it has just saved, unseen by
            autograd's version counter, the later version.
        shape: Elements along each dimension.
        stride: Elements between neighbours, one number a dimension.
        offset: Elements between the start of the storage and the first one.
        dtype: Name without its package, such as `"float32"`.
    """

    op: int
    buffer_id: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. `validate` states what must hold of it.

    Attributes:
        header: Where it comes from.
        buffers: All buffers, by id.
        ops: All ops, by index.
        saved_tensors: What autograd saved, in the order in which it did.
    """

    header: Header
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    saved_tensors: tuple[SavedTensor, ...] = ()


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest point of a load curve.

    Attributes:
        op: Index of the first op at which it is reached.
        size_bytes: Bytes alive there.
    """

    op: int
    size_bytes: int


class Life(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What has to be placed in memory, and when: a half-open interval of moments.

    Attributes:
        id: Of the buffer or of the storage, as the function that made it says.
        start_op: First moment alive, never below 0.
        end_op: First moment no longer alive; equal to `start_op` for a buffer that op 0 overwrites.
        size_bytes: Bytes in between.
    """

    id: int
    start_op: int
    end_op: int
    size_bytes: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The trace in a few numbers.

    Attributes:
        num_ops: Ops, pseudo-ops included.
        num_ops_by_phase: The same, apart.
        num_buffers: Versions of content.
        num_storages: Allocations.
        num_saved_tensors: Views that autograd saved.
        before_step_bytes: Bytes that are alive when the step begins.
        saved_bytes: Bytes of the distinct buffers born in the step that autograd saved.
        bytes_by_kind: Bytes of all storages, each once at its largest version and under that version's kind.
        time_s: Sum of the ops' times.
        peak: The highest point of the load, workspaces left out.
    """

    num_ops: int
    num_ops_by_phase: dict[Phase, int]
    num_buffers: int
    num_storages: int
    num_saved_tensors: int
    before_step_bytes: int
    saved_bytes: int
    bytes_by_kind: dict[BufferKind, int]
    time_s: float
    peak: Peak


def load_curve(trace: Trace, *, with_workspace: bool = False) -> list[int]:
    """Return the live bytes at each op.

    An op's inputs and outputs count together; a version that is overwritten in place does not count beside the one
    that replaces it. Linear in buffers and ops.

    Args:
        trace: A valid trace.
        with_workspace: Add what each op allocates inside itself, as an allocator would count it.
    """
    changes = [0] * (len(trace.ops) + 1)
    for buffer in trace.buffers:
        changes[max(buffer.birth_op, 0)] += buffer.size_bytes
        changes[buffer.death_op] -= buffer.size_bytes
    load = list(accumulate(changes[:-1]))
    if with_workspace:
        return [bytes_ + op.workspace_bytes for bytes_, op in zip(load, trace.ops, strict=True)]
    return load


def peak(trace: Trace, *, with_workspace: bool = False) -> Peak:
    """Return the highest point of the load curve, the first of equals."""
    load = load_curve(trace, with_workspace=with_workspace)
    size_bytes = max(load)
    return Peak(op=load.index(size_bytes), size_bytes=size_bytes)


def live_buffers(trace: Trace, op: int) -> tuple[Buffer, ...]:
    """Return the buffers that are alive at an op, largest first, then by id: their sizes add up to the load there."""
    live = (buffer for buffer in trace.buffers if buffer.birth_op <= op < buffer.death_op)
    return tuple(sorted(live, key=lambda buffer: (-buffer.size_bytes, buffer.id)))


def buffer_lives(trace: Trace) -> tuple[Life, ...]:
    """Return each buffer's life within the step, by buffer id."""
    return tuple(
        Life(id=buffer.id, start_op=max(buffer.birth_op, 0), end_op=buffer.death_op, size_bytes=buffer.size_bytes)
        for buffer in trace.buffers
    )


def storage_lives(trace: Trace) -> tuple[Life, ...]:
    """Return each storage's life within the step, by storage id, at the size of its largest version.

    This is what an allocator sees, and what the pool places. Its load equals `load_curve` unless a storage is resized.
    """
    versions = _versions(trace)
    return tuple(
        Life(
            id=storage_id,
            start_op=max(versions[storage_id][0].birth_op, 0),
            end_op=versions[storage_id][-1].death_op,
            size_bytes=max(buffer.size_bytes for buffer in versions[storage_id]),
        )
        for storage_id in sorted(versions)
    )


def counts(trace: Trace) -> Counts:
    """Return the trace in a few numbers."""
    bytes_by_kind: Counter[BufferKind] = Counter()
    versions = _versions(trace)
    for buffers in versions.values():
        largest = max(buffers, key=lambda buffer: buffer.size_bytes)
        bytes_by_kind[largest.kind] += largest.size_bytes
    return Counts(
        num_ops=len(trace.ops),
        num_ops_by_phase=dict(Counter(op.phase for op in trace.ops)),
        num_buffers=len(trace.buffers),
        num_storages=len(versions),
        num_saved_tensors=len(trace.saved_tensors),
        before_step_bytes=sum(b.size_bytes for b in trace.buffers if b.birth_op == BEFORE_STEP),
        saved_bytes=sum(b.size_bytes for b in trace.buffers if b.saved and b.birth_op != BEFORE_STEP),
        bytes_by_kind=dict(bytes_by_kind),
        time_s=math.fsum(op.time_s for op in trace.ops),
        peak=peak(trace),
    )


def _versions(trace: Trace) -> dict[int, list[Buffer]]:
    """Return each storage's buffers in order of birth."""
    versions: dict[int, list[Buffer]] = {}
    for buffer in sorted(trace.buffers, key=lambda buffer: buffer.birth_op):
        versions.setdefault(buffer.storage_id, []).append(buffer)
    return versions


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

    Planners, simulator and pool rely on them without looking again, so whatever makes a trace calls this once.

    Raises:
        TraceFileError: With one line that names the record and what is wrong with it.
    """
    fault = find_fault(trace)
    if fault is not None:
        raise TraceFileError(fault.message)


def find_fault(trace: Trace) -> Fault | None:
    """Return the first violation of an invariant, None if the trace is valid. Linear but for a sort of the buffers."""
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
        elif op.workspace_bytes < 0:
            wrong = f"negative workspace_bytes {op.workspace_bytes}"
        elif unknown := [id_ for id_ in (*op.reads, *op.writes) if not 0 <= id_ < num_buffers]:
            wrong = f"unknown buffer {unknown[0]}, the trace has {num_buffers}"
        elif len(set(op.reads)) < len(op.reads) or len(set(op.writes)) < len(op.writes):
            wrong = "the same buffer twice in its reads or twice in its writes"
        else:
            continue
        return Fault(record="op", index=place, message=f"op {op.index} ({op.name}): {wrong}")
    return None


def _birth_fault(trace: Trace) -> Fault | None:
    """Find an op that writes what is born elsewhere, or a buffer that nobody wrote."""
    num_writers = [0] * len(trace.buffers)
    for op in trace.ops:
        for id_ in op.writes:
            birth_op = trace.buffers[id_].birth_op
            if birth_op != op.index:
                born = "before the step" if birth_op == BEFORE_STEP else f"at op {birth_op}"
                message = f"op {op.index} ({op.name}): writes buffer {id_}, which is born {born}"
                return Fault(record="op", index=op.index, message=message)
            num_writers[id_] += 1
    for buffer in trace.buffers:
        if buffer.birth_op != BEFORE_STEP and not num_writers[buffer.id]:
            message = f"buffer {buffer.id}: born at op {buffer.birth_op}, which does not write it"
            return Fault(record="buffer", index=buffer.id, message=message)
    return None


def _version_fault(trace: Trace) -> Fault | None:
    for storage_id, buffers in _versions(trace).items():
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
                # See [Note: versions of a storage]: an op may read what it overwrites.
                if overwritten is None:
                    overwritten = {buffers[written].storage_id for written in op.writes}
                if buffer.death_op == op.index and buffer.storage_id in overwritten:
                    continue
                wrong = f"reads buffer {id_} after its death at op {buffer.death_op}"
            return Fault(record="op", index=op.index, message=f"op {op.index} ({op.name}): {wrong}")
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
