"""Plans for steps that do not use all that persists: micro-batches of an accumulation, whose optimizer steps later.

[Note: idle tensors]
A plan is that of a step which repeats. So a gradient that is left for the next micro-batch, and a state that only the
optimizer uses, have no next use in a micro-batch without the optimizer's step, and hence no time in which they could be
away: they count as here, and a budget below what persists seems impossible. If no plan is found, the step is planned
once more without them: each leaves right after its last use, or at the beginning of the step, and comes back when it is
used, in a later one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from torchdelta.trace.model import BEFORE_STEP, uses_of, versions_over_end

if TYPE_CHECKING:
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Buffer, Trace

__all__ = ["LEAVING_OPS", "without_idle"]

LEAVING_OPS: Final = 4  # how many ops after its last use a tensor is taken to be gone: its copy out takes time


def without_idle(trace: Trace, log: StepLog) -> tuple[Trace, StepLog] | None:
    """Return a step in which persistent tensors that have no next use leave after their last one. None: there are none.

    Args:
        trace: The step.
        log: Which of its buffers hold persistent tensors.
    """
    num_ops = len(trace.ops)
    uses, over_end = uses_of(trace), versions_over_end(trace)
    released: list[tuple[int, int]] = []

    def shortened(buffer: Buffer) -> Buffer:
        key = log.persistents.get(buffer.id)
        if key is None or not buffer.size_bytes or buffer.death_op != num_ops:
            return buffer
        if not uses[buffer.id] and buffer.birth_op == BEFORE_STEP:
            released.append((0, key))
            return structs.replace(buffer, size_bytes=0)
        death_op = (uses[buffer.id] or [buffer.birth_op])[-1] + LEAVING_OPS
        if buffer.id in over_end or death_op >= num_ops:
            return buffer
        released.append((death_op, key))
        return structs.replace(buffer, death_op=death_op)

    buffers = tuple(map(shortened, trace.buffers))
    if not released:
        return None
    return structs.replace(trace, buffers=buffers), replace(log, released=tuple(released))
