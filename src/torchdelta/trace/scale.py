"""A step at any batch size, from its traces at two.

Nearly all that a step allocates, moves and multiplies grows linearly with its batch, so two traces fix every number at
any other batch. What compares the samples of a batch with one another (a contrastive loss) does not, which a third
trace shows. Only what a convolution allocates inside itself has an end on an accelerator. Batch 1 is none of the two:
there some libraries take other ways (GPT-2's op list changes).
"""

from itertools import zip_longest
from typing import Final

from msgspec.structs import replace

from torchdelta.errors import TraceError
from torchdelta.trace.model import Buffer, Op, Product, SavedTensor, Trace

__all__ = ["CONVOLUTION_WORKSPACE_BYTES", "difference_from_line", "scale"]

CONVOLUTION_WORKSPACE_BYTES: Final = 128 * 2**20
"""The most that a convolution is taken to allocate inside itself on a device that is no CPU, at any batch: ours, an
estimate. Libraries choose among their kernels those that fit a limit."""

_NOTABLE_SHARE: Final = 0.2
_SAME_OP: Final = ("name", "phase", "module", "reads", "writes", "random", "recomputable", "node", "dtype", "layout")
_SAME_BUFFER: Final = ("storage_id", "kind", "birth_op", "death_op", "saved")


def scale(first: Trace, second: Trace, batch_size: int) -> Trace:
    """Return the trace of the same step at another batch size.

    Raises:
        TraceError: The traces have no batch size, or the same, or they are not of one step: the first op or buffer
            that differs is named.
    """
    sizes = (first.header.batch_size, second.header.batch_size)
    if None in sizes or sizes[0] == sizes[1]:
        raise TraceError(
            f"two traces of different batch sizes are needed to price others, not {sizes[0]} and {sizes[1]}"
        )
    if batch_size < 1:
        raise TraceError(f"batch size {batch_size} is no batch: use 1 or more")
    _check(first, second)
    line = _Line(int(sizes[0] or 0), int(sizes[1] or 0), batch_size, is_cpu=first.header.device == "cpu")
    return Trace(
        header=replace(first.header, batch_size=batch_size),
        buffers=tuple(line.buffer(a, b) for a, b in zip(first.buffers, second.buffers, strict=True)),
        ops=tuple(line.op(a, b) for a, b in zip(first.ops, second.ops, strict=True)),
        saved_tensors=tuple(line.saved(a, b) for a, b in zip(first.saved_tensors, second.saved_tensors, strict=True)),
    )


def difference_from_line(first: Trace, second: Trace, third: Trace) -> str:
    """Return what of a third trace of a step is not on the line through two others, in words; "" if all is.

    Rounded sizes are a little off the line; only a fifth and more counts.

    Raises:
        TraceError: As `scale`.
    """
    batch_size = int(third.header.batch_size or 0)
    expected = scale(first, second, batch_size)
    try:
        _check(first, third)
    except TraceError as error:
        return str(error)
    for one, other in zip(expected.buffers, third.buffers, strict=True):
        if abs(one.size_bytes - other.size_bytes) > _NOTABLE_SHARE * other.size_bytes:
            made_by = third.ops[other.birth_op] if other.birth_op >= 0 else None
            what = f"what {made_by.name} makes" if made_by is not None else f"a buffer of kind {other.kind}"
            where = f" in {made_by.module}" if made_by is not None and made_by.module else ""
            return f"{what}{where} has {other.size_bytes} bytes at batch {batch_size}, not {one.size_bytes}"
    for one, other in zip(expected.ops, third.ops, strict=True):
        if abs(one.flops - other.flops) > _NOTABLE_SHARE * other.flops:
            return f"{other.name} takes {other.flops} FLOPs at batch {batch_size}, not {one.flops}"
    return ""


class _Line:
    """The straight line through two batch sizes, read off at a third."""

    def __init__(self, first: int, second: int, wanted: int, *, is_cpu: bool) -> None:
        self._is_cpu = is_cpu
        # Both are signed alike whichever of the two is the smaller batch.
        self._span = abs(second - first)
        self._way = (wanted - first) * (1 if second > first else -1)

    def int_at(self, first: int, second: int) -> int:
        # Integers, so that what is linear comes out exact; rounded where it is not (a padded size), never below 0.
        return max(first + ((second - first) * self._way + self._span // 2) // self._span, 0)

    def float_at(self, first: float, second: float) -> float:
        return max(first + (second - first) * self._way / self._span, 0.0)

    def ints_at(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.int_at(a, b) for a, b in zip(first, second, strict=True))

    def buffer(self, first: Buffer, second: Buffer) -> Buffer:
        return replace(first, size_bytes=self.int_at(first.size_bytes, second.size_bytes))

    def op(self, first: Op, second: Op) -> Op:
        return replace(
            first,
            time_s=self.float_at(first.time_s, second.time_s),
            workspace_bytes=self._workspace_bytes(first, second),
            flops=self.int_at(first.flops, second.flops),
            moved_bytes=self.int_at(first.moved_bytes, second.moved_bytes),
            product=self._product(first.product, second.product),
        )

    def _product(self, first: Product | None, second: Product | None) -> Product | None:
        if first is None or second is None:
            return None
        return Product(
            groups=self.int_at(first.groups, second.groups),
            rows=self.int_at(first.rows, second.rows),
            columns=self.int_at(first.columns, second.columns),
            inner=self.int_at(first.inner, second.inner),
            window=first.window,
        )

    def _workspace_bytes(self, first: Op, second: Op) -> int:
        size_bytes = self.int_at(first.workspace_bytes, second.workspace_bytes)
        if self._is_cpu or "convolution" not in first.name:
            return size_bytes
        return min(size_bytes, max(CONVOLUTION_WORKSPACE_BYTES, first.workspace_bytes, second.workspace_bytes))

    def saved(self, first: SavedTensor, second: SavedTensor) -> SavedTensor:
        return replace(
            first,
            shape=self.ints_at(first.shape, second.shape),
            stride=self.ints_at(first.stride, second.stride),
            offset=self.int_at(first.offset, second.offset),
        )


def _check(first: Trace, second: Trace) -> None:
    sizes = f"batch sizes {first.header.batch_size} and {second.header.batch_size}"
    for kind, fields, ones, others in (
        ("op", _SAME_OP, first.ops, second.ops),
        ("buffer", _SAME_BUFFER, first.buffers, second.buffers),
        ("saved tensor", ("op", "buffer_id", "dtype"), first.saved_tensors, second.saved_tensors),
    ):
        for place, (one, other) in enumerate(zip_longest(ones, others)):
            if one is None or other is None:
                raise TraceError(f"the steps at {sizes} differ: {len(ones)} and {len(others)} {kind}s")
            for field in fields:
                values = getattr(one, field), getattr(other, field)
                if values[0] != values[1]:
                    raise TraceError(
                        f"the steps at {sizes} differ: {kind} {place} has {field} {values[0]!r} and {values[1]!r}"
                    )
    for place, (one, other) in enumerate(zip(first.saved_tensors, second.saved_tensors, strict=True)):
        if len(one.shape) != len(other.shape):
            raise TraceError(
                f"the steps at {sizes} differ: saved tensor {place} has shape {one.shape} and {other.shape}"
            )
