"""Gaps: the times between two uses of a buffer, over which it may leave the device.

A buffer is used by the op that writes it and by each op that reads it. A gap is open when at least one op runs in
between. What a decision class allows is a list of gaps ([Note: absences] in `plan/model.py`), and a decision is one
code for each.

The classes *persistent* and *all* have gaps over the end of the step too: of a parameter, gradient or optimizer state
whose storage outlives the step, from the last use of its last version to the first use of its first one in the
following step ([Note: over the end] in `plan/model.py`). The op that writes over the first version is a use of it,
whether it reads it or not.
"""

from itertools import pairwise

import msgspec

from torchdelta.plan.model import DecisionClass
from torchdelta.trace.model import BEFORE_STEP, Trace, uses_of, versions_over_end
from torchdelta.trace.replay_reads import remade_until_ops

__all__ = ["MIN_SIZE_BYTES", "Gap", "find_gaps"]

MIN_SIZE_BYTES = 2**18
"""Smaller buffers stay: they cost more to handle than they free."""

_SWAPPED_KINDS = frozenset({"parameter", "gradient", "optimizer_state"})


class Gap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A time in which a buffer could be away.

    Attributes:
        buffer_id: The buffer.
        size_bytes: Its size.
        last_use_op: The use before.
        next_use_op: The use after; `num_ops` or more for a use in the following step.
        can_recompute: Whether a replay within the gap can make it again, as far as the trace alone tells.
        can_recompute_at_use: Whether one can at `next_use_op`, whatever else has left. Without that, it has to return
            in a replay before, for another buffer.
    """

    buffer_id: int
    size_bytes: int
    last_use_op: int
    next_use_op: int
    can_recompute: bool
    can_recompute_at_use: bool


def find_gaps(
    trace: Trace, *, decision_class: DecisionClass = "saved", min_size_bytes: int = MIN_SIZE_BYTES
) -> tuple[Gap, ...]:
    """Return the gaps that a decision class may use, by `last_use_op`, then by buffer.

    Smaller buffers than `min_size_bytes` have none.
    """
    remade_until = remade_until_ops(trace)
    uses_by_buffer = uses_of(trace)
    swaps_persistent = decision_class in ("persistent", "all")
    over_end = versions_over_end(trace) if swaps_persistent else {}
    gaps: list[Gap] = []
    for buffer, uses in zip(trace.buffers, uses_by_buffer, strict=True):
        if buffer.size_bytes < min_size_bytes or not buffer.size_bytes:
            continue
        born = buffer.birth_op != BEFORE_STEP
        if swaps_persistent and buffer.kind in _SWAPPED_KINDS:
            pairs = list(pairwise(uses))
        elif decision_class in ("saved", "persistent"):
            in_forward = born and trace.ops[buffer.birth_op].phase == "forward"
            pairs = _forward_to_backward(trace, uses) if in_forward and buffer.saved else []
        elif born:
            pairs = list(pairwise(uses))
        else:
            pairs = []
        if buffer.id in over_end and buffer.kind in _SWAPPED_KINDS:
            first = over_end[buffer.id]
            again = uses_by_buffer[first.id] + [first.death_op] * (first.death_op < len(trace.ops))
            pairs += [(uses[-1], len(trace.ops) + again[0])] if uses else []
        gaps += [
            Gap(
                buffer_id=buffer.id,
                size_bytes=buffer.size_bytes,
                last_use_op=last,
                next_use_op=following,
                can_recompute=remade_until[buffer.id] > last and buffer.kind not in _SWAPPED_KINDS,
                can_recompute_at_use=remade_until[buffer.id] >= following and buffer.kind not in _SWAPPED_KINDS,
            )
            for last, following in pairs
            if following > last + 1
        ]
    return tuple(sorted(gaps, key=lambda gap: (gap.last_use_op, gap.buffer_id)))


def _forward_to_backward(trace: Trace, uses: list[int]) -> list[tuple[int, int]]:
    forward = [op for op in uses if trace.ops[op].phase == "forward"]
    after = [op for op in uses if trace.ops[op].phase != "forward"]
    return [(forward[-1], after[0])] if forward and after else []
