"""A plan in which all saved tensors have left when backward begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.plan.model import Absence, Plan, PlanHeader
from torchdelta.simulate.gaps import find_gaps

if TYPE_CHECKING:
    from torchdelta.trace.model import Trace

LEAST_BYTES = 4096


def all_away(trace: Trace, action: str, *, at_use: bool = False) -> Plan:
    """Return that plan for tensors of at least `LEAST_BYTES`.

    Args:
        trace: Of the step.
        action: Of all of them, "swap" or "recompute".
        at_use: Whether each leaves before backward begins and returns at its next use; by default, each leaves at once
            and all return when backward begins.
    """
    gaps = find_gaps(trace, decision_class="saved", min_size_bytes=LEAST_BYTES)
    first = min(gap.next_use_op for gap in gaps)
    absences = [
        Absence(
            buffer_id=gap.buffer_id,
            last_use_op=gap.last_use_op,
            next_use_op=gap.next_use_op,
            action=action,
            out_op=gap.last_use_op if action == "swap" else None,
            leave_op=first if at_use else gap.last_use_op + 1,
            return_op=gap.next_use_op if at_use else first,
        )
        for gap in gaps
    ]
    header = PlanHeader(
        planner="all-away", machine="", budget_bytes=0, num_ops=len(trace.ops), num_buffers=len(trace.buffers)
    )
    return Plan(header=header, absences=tuple(absences))
