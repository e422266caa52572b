"""Absences over the end of a step, as the parts that lie within it. See [Note: over the end] in `plan/model.py`."""

from collections.abc import Mapping

from msgspec.structs import replace

from torchdelta.plan.model import Absence
from torchdelta.trace.model import Buffer, Trace

__all__ = ["parts_within_step"]


def parts_within_step(trace: Trace, absence: Absence, over_end: Mapping[int, Buffer]) -> tuple[Absence, ...]:
    """Return the parts of an absence that lie within the step, each by the buffer that is away in it."""
    num_ops = len(trace.ops)
    if absence.next_use_op < num_ops:
        return (absence,)
    parts: list[Absence] = []
    if absence.return_op > num_ops:
        leave_op = max(absence.leave_op - num_ops, 0)  # what leaves only in the next step is there until then
        first = over_end[absence.buffer_id]
        back = {"return_op": absence.return_op - num_ops, "next_use_op": absence.next_use_op - num_ops}
        parts.append(replace(absence, buffer_id=first.id, leave_op=leave_op, **back))
    if absence.leave_op < num_ops:
        parts.append(replace(absence, return_op=min(absence.return_op, num_ops)))
    return tuple(parts)
