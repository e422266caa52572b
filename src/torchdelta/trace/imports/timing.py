"""Puts the op times that a profile measured on a GPU into a step that was traced without one.

[Note: which time an op gets]
An op of the traced step gets the median time of the ops of the same name and the same shapes in the profile, in
whatever order the shapes are (torch has changed the order of some). Names that differ between the two, because a
library's op stands for torch's, are in `_ALIASES`. An op that the profile does not show keeps the time that it was
priced at, times what the measured ops took of their own prices: those that multiply matrices and the others apart.

The result has no FLOPs and no moved bytes: a roofline is not to price again what was measured.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

from torchdelta.errors import TraceError
from torchdelta.trace.frame import one_line
from torchdelta.trace.imports.kineto import Profile, Shape
from torchdelta.trace.model import Op, Trace

__all__ = ["MIN_SHARE", "Match", "with_measured_times"]

MIN_SHARE: Final = 0.3
"""Less of a step's time than this, and the profile is taken for one of another step."""

_ALIASES: Final = {
    "convolution_backward": ("cudnn_convolution_backward", "miopen_convolution_backward"),
    "native_batch_norm": ("cudnn_batch_norm", "miopen_batch_norm"),
    "_native_batch_norm_legit": ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    "_batch_norm_with_update": ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    "native_batch_norm_backward": ("cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
    "batch_norm_backward": ("native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
    "accumulate": ("add", "add_"),
    "relu_": ("clamp_min_",),
    "relu": ("clamp_min",),
    "_to_copy": ("to",),
}


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a step a profile shows.

    Attributes:
        num_ops: Ops of the step that got a measured time.
        share: Of the step's time as it was priced.
        matrix_factor: Measured over priced time of what multiplies matrices; 1.0 if the profile shows none of it.
        other_factor: The same of all other ops.
        profiled_s: Seconds on the device of all ops of the profile.
    """

    num_ops: int
    share: float
    matrix_factor: float
    other_factor: float
    profiled_s: float


def with_measured_times(
    priced: Trace, shapes: Sequence[tuple[Shape, ...]], profile: Profile, *, source: str
) -> tuple[Trace, Match]:
    """Return a priced step with the times of a profile in place of its own: see [Note: which time an op gets].

    Args:
        priced: The step, priced for the machine of the profile.
        shapes: For each op, the shapes of its tensors.
        profile: A step of the same model at the same batch size.
        source: Where the profile is from, for messages and the trace's comment.

    Raises:
        TraceError: It shows less than `MIN_SHARE` of the step's time.
    """
    measured = [_measured_s(op, shape, profile) for op, shape in zip(priced.ops, shapes, strict=True)]
    pairs = [(op, time_s) for op, time_s in zip(priced.ops, measured, strict=True) if time_s is not None]
    matrix_factor = _factor([pair for pair in pairs if pair[0].flops])
    other_factor = _factor([pair for pair in pairs if not pair[0].flops])
    total_s = sum(op.time_s for op in priced.ops)
    match = Match(
        num_ops=len(pairs),
        share=sum(op.time_s for op, _ in pairs) / total_s if total_s else 0.0,
        matrix_factor=matrix_factor or other_factor or 1.0,
        other_factor=other_factor or matrix_factor or 1.0,
        profiled_s=sum(op.device_s for op in profile.ops),
    )
    if match.share < MIN_SHARE:
        raise TraceError(
            f"{source} covers only {match.share:.0%} of this step's time, {match.num_ops} of its {len(priced.ops)} ops "
            f"by name and shapes: it was recorded with another model or batch size, or without record_shapes=True"
        )
    ops = tuple(
        replace(
            op,
            time_s=op.time_s * (match.matrix_factor if op.flops else match.other_factor) if time_s is None else time_s,
            flops=0,
            dtype="",
            moved_bytes=0,
        )
        for op, time_s in zip(priced.ops, measured, strict=True)
    )
    header = replace(
        priced.header,
        device_name=profile.device_name,
        comment=f"{priced.header.comment}, op times of {one_line(source)}",
    )
    return replace(priced, header=header, ops=ops), match


def _measured_s(op: Op, shapes: tuple[Shape, ...], profile: Profile) -> float | None:
    base = op.name.split(".")[1] if "." in op.name else op.name
    key = tuple(
        sorted(shape for shape in shapes if shape)
    )  # a profile shows tensors of no dimension as it does numbers
    if not key:
        return None
    for name in (base, *_ALIASES.get(base, ())):
        times_s = profile.times_s.get((f"aten::{name}", key))
        if times_s:
            return median(times_s)
    return None


def _factor(pairs: Sequence[tuple[Op, float]]) -> float:
    priced_s = sum(op.time_s for op, _ in pairs)
    return sum(time_s for _, time_s in pairs) / priced_s if priced_s else 0.0
