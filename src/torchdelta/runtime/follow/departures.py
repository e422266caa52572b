"""Plans for steps that leave persistent tensors to later ones: micro-batches, whose optimizer steps later.

[Note: departures]
A plan is that of a step which repeats. A gradient that is left for the next micro-batch, and a state that only the
optimizer uses, have no next use in a micro-batch without the optimizer's step, and hence no time in which they could be
away: they count as here, and a budget below what persists seems impossible. So if no plan is found, the step is planned
once more, and such tensors *depart* in it: a gradient is copied out after its last use, and counts as gone
`DEPARTURE_OPS` ops after it; a state leaves at the beginning of the step. They come back when a later step uses them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from torchdelta.trace.model import BEFORE_STEP, uses_of, versions_over_end

if TYPE_CHECKING:
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Buffer, Trace

__all__ = ["DEPARTURE_OPS", "makes_states", "with_departures"]

DEPARTURE_OPS: Final = 4  # its copy out takes time
_COUNTER_BYTES: Final = 16  # a state this small, such as the step counter, may be a new tensor in each step


def with_departures(trace: Trace, log: StepLog) -> tuple[Trace, StepLog] | None:
    """Return a step in which persistent tensors without a next use depart; None if there are none.

    Args:
        trace: The step.
        log: Which of its buffers are content of persistent tensors.
    """
    num_ops = len(trace.ops)
    uses, over_end = uses_of(trace), versions_over_end(trace)
    departures: list[tuple[int, int]] = []

    def shortened(buffer: Buffer) -> Buffer:
        key = log.persistents.get(buffer.id)
        if key is None or not buffer.size_bytes or buffer.death_op != num_ops:
            return buffer
        if not uses[buffer.id] and buffer.birth_op == BEFORE_STEP:
            departures.append((0, key))
            return structs.replace(buffer, size_bytes=0)
        death_op = (uses[buffer.id] or [buffer.birth_op])[-1] + DEPARTURE_OPS
        if buffer.id in over_end or death_op >= num_ops:
            return buffer
        departures.append((death_op, key))
        return structs.replace(buffer, death_op=death_op)

    buffers = tuple(map(shortened, trace.buffers))
    if not departures:
        return None
    return structs.replace(trace, buffers=buffers), replace(log, departures=tuple(departures))


def makes_states(trace: Trace) -> bool:
    """Return whether an optimizer makes its states in a step: its first one. Later steps need other memory."""
    found_there = {buffer.storage_id for buffer in trace.buffers if buffer.birth_op == BEFORE_STEP}
    states = (each for each in trace.buffers if each.kind == "optimizer_state" and each.size_bytes > _COUNTER_BYTES)
    return any(state.storage_id not in found_there and state.death_op == len(trace.ops) for state in states)
