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
from itertools import accumulate
from typing import Literal

import msgspec

FORMAT_NAME = "torchdelta-trace"
FORMAT_VERSION = 3
"""What is written. Version 1 had no `flops`, `dtype` and `moved_bytes`, version 2 no `product` and `layout`; both are
read as if these were unknown."""

READABLE_VERSIONS = (1, 2, 3)

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


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="header", forbid_unknown_fields=True):
    """Where a trace comes from. The first record of a file.

    Attributes:
        format: Always `FORMAT_NAME`.
        version: Version of the format; a reader refuses a newer one than its own. In memory always the newest.
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


class Product(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The sizes of what an op multiplies: equal products of a (rows x inner) by an (inner x columns) matrix.

    A convolution is the product of its unfolded input and its weight, and its backward has the sizes of its forward;
    attention is its first product, of queries and keys.

    Attributes:
        groups: How many independent products: a batch of matrices, the groups of a convolution, batch times heads.
        rows: Rows of each result: tokens, output positions of the whole batch (of a transposed convolution: input
            positions), queries.
        columns: Columns of each result: output channels of a group, keys.
        inner: Length of the sums: input channels of a group, width of a head. A convolution sums over `window` as well.
        window: Positions in a convolution's kernel, such as 9; 0 for what is no convolution.
    """

    groups: int = 1
    rows: int
    columns: int
    inner: int
    window: int = 0


class Op(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="op", forbid_unknown_fields=True, gc=False):
    """One op that ran. Ops that only make a view neither read nor write content and need not be recorded.

    Attributes:
        index: Position in the step, dense from 0.
        name: Overload name, such as `"aten.mm.default"`. See [Note: what no op made] for the names of pseudo-ops.
        phase: The part of the step that it ran in.
        module: Path of the innermost module that was running, such as `"transformer.h.0.attn"`; `""` outside of all.
        reads: Ids of the buffers that its arguments view, each once, in the order of the arguments. One whose content
            it surely does not need may be left out: the version that `copy_` or `zero_` overwrites unseen.
        writes: Ids of the buffers that it made, each once: in fresh storages or as new versions of old ones, hidden
            writes (batch-norm statistics) included.
        time_s: Seconds that it took on the device, 0.0 if not measured.
        random: Whether it drew from a random generator.
        recomputable: Whether a second run from the same inputs (and generator state, if `random`) is known to give the
            same bits.
        workspace_bytes: The most that it allocated inside itself beside its outputs and freed again; also the extra
            bytes of a storage that it grew and had to hold twice. 0 if none or unknown.
        node: Name of the autograd node that called it, such as `"MmBackward0"`; `""` outside of backward.
        flops: Floating-point operations of its matrix products and convolutions, a multiply-add counted as two; 0 for
            other ops, whose time is that of their bytes, and if unknown.
        dtype: What it multiplies, such as `"float32"`; `""` if unknown or without `flops`.
        moved_bytes: Bytes that it reads and writes: of the views that it is given, not of their whole buffers. 0 if
            unknown; then the buffers' sizes stand for them.
        product: The sizes of what it multiplies; None if unknown or without `flops`.
        layout: `"channels_last"` where a tensor of 4 or 5 dimensions among its arguments has its channels innermost in
            memory; `""` otherwise and if unknown.
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
    flops: int = 0
    dtype: str = ""
    moved_bytes: int = 0
    product: Product | None = None
    layout: str = ""


class SavedTensor(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="saved", forbid_unknown_fields=True, gc=False
):
    """A view of a buffer that autograd kept for backward.

    Attributes:
        op: Index of the op that was next to run when autograd packed it, `num_ops` if none followed. An op's inputs are
            packed before the op runs (so `op` is its index), its outputs after it (so `op` is one more). Of one that
            the op then writes, `op` is the index of that op.
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


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The trace in a few numbers.

    Attributes:
        num_ops: Ops, pseudo-ops included.
        num_buffers: Versions of content.
        before_step_bytes: Bytes that are alive when the step begins.
        saved_bytes: Bytes of the distinct buffers born in the step that autograd saved.
        bytes_by_kind: Bytes of all storages, each once at its largest version and under that version's kind.
        time_s: Sum of the ops' times.
        peak: The highest point of the load, workspaces left out.
    """

    num_ops: int
    num_buffers: int
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


def counts(trace: Trace) -> Counts:
    """Return the trace in a few numbers."""
    bytes_by_kind: Counter[BufferKind] = Counter()
    for buffers in storage_versions(trace).values():
        largest = max(buffers, key=lambda buffer: buffer.size_bytes)
        bytes_by_kind[largest.kind] += largest.size_bytes
    return Counts(
        num_ops=len(trace.ops),
        num_buffers=len(trace.buffers),
        before_step_bytes=sum(b.size_bytes for b in trace.buffers if b.birth_op == BEFORE_STEP),
        saved_bytes=sum(b.size_bytes for b in trace.buffers if b.saved and b.birth_op != BEFORE_STEP),
        bytes_by_kind=dict(bytes_by_kind),
        time_s=math.fsum(op.time_s for op in trace.ops),
        peak=peak(trace),
    )


def storage_versions(trace: Trace) -> dict[int, list[Buffer]]:
    """Return each storage's buffers in order of birth."""
    versions: dict[int, list[Buffer]] = {}
    for buffer in sorted(trace.buffers, key=lambda buffer: buffer.birth_op):
        versions.setdefault(buffer.storage_id, []).append(buffer)
    return versions


def uses_of(trace: Trace) -> list[list[int]]:
    """Return the ops that use each buffer, in order: its birth, if an op of the step wrote it, then its reads."""
    uses: list[list[int]] = [[] if b.birth_op == BEFORE_STEP else [b.birth_op] for b in trace.buffers]
    for op in trace.ops:
        for buffer_id in op.reads:
            uses[buffer_id].append(op.index)
    return uses


def versions_over_end(trace: Trace) -> dict[int, Buffer]:
    """Return the first version of each storage that outlives the step from before it, by the id of the last version.

    What the last version holds at the end of one step is what the next one finds in the first. Storages that the step
    leaves at another size than it found them at are left out: they are not the same from step to step.
    """
    ends: dict[int, Buffer] = {}
    for versions in storage_versions(trace).values():
        first, last = versions[0], versions[-1]
        lasts = first.birth_op == BEFORE_STEP and last.death_op == len(trace.ops)
        if lasts and all(version.size_bytes == first.size_bytes for version in versions):
            ends[last.id] = first
    return ends
