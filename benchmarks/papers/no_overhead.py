"""AutoSwap's schedule that never waits (Zhang et al. 2019): copies run beside compute, the load falls where it falls.

Copies out, in order of the last use: each starts when its buffer has been used and the one before has ended, and the
memory is free at the first op that starts after its end. Copies back, from the last use backward: each ends by its use
and by the start of the one after it, and takes its memory when it starts. Who would come back before it is gone stays.
"""

import math
from itertools import pairwise

import msgspec
import numpy as np

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Absence, Plan, PlanHeader
from torchdelta.planners.literature.autoswap import MIN_BYTES, Candidates, Score
from torchdelta.planners.literature.ideal import IdealLoad, in_s, out_s, start_times_s
from torchdelta.simulate.gaps import Gap
from torchdelta.trace.model import BEFORE_STEP, Buffer, Trace, storage_versions

__all__ = ["NoOverhead", "gaps_of_variables", "no_overhead", "reduction"]

_NUM_LIMITS = 96


class NoOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of swaps saves if nothing may wait.

    Attributes:
        peak_bytes: The peak with them.
        plain_peak_bytes: The peak without.
        plan: The swaps that take effect, for a budget of `peak_bytes`.
    """

    peak_bytes: int
    plain_peak_bytes: int
    plan: Plan

    @property
    def reduction(self) -> float:
        """The share of the peak that is saved: 0.3 is 30 %."""
        return 1 - self.peak_bytes / self.plain_peak_bytes if self.plain_peak_bytes else 0.0


def gaps_of_variables(trace: Trace, *, min_size_bytes: int) -> tuple[Gap, ...]:
    """Return the gaps between two uses that follow each other of every variable, over the end of the step included.

    A variable of the paper is a memory block: here a storage with all versions of its content, so that a momentum that
    every step overwrites is one variable that is idle from one optimizer step to the next.
    """
    gaps: list[Gap] = []
    for versions in storage_versions(trace).values():
        size_bytes = max(buffer.size_bytes for buffer in versions)
        if size_bytes < min_size_bytes:
            continue
        ids = {buffer.id: buffer for buffer in versions}
        uses = sorted({(op, id_) for id_, ops in _uses(trace, ids).items() for op in ops})
        last_version = versions[-1]
        pairs = [(first, second, id_) for (first, id_), (second, _) in pairwise(uses)]
        if versions[0].birth_op == BEFORE_STEP and last_version.death_op == len(trace.ops) and uses:
            pairs.append((uses[-1][0], len(trace.ops) + uses[0][0], uses[-1][1]))
        gaps += [
            Gap(
                buffer_id=id_,
                size_bytes=size_bytes,
                last_use_op=first,
                next_use_op=second,
                can_recompute=False,
                can_recompute_at_use=False,
            )
            for first, second, id_ in pairs
            if second > first + 1
        ]
    return tuple(sorted(gaps, key=lambda gap: (gap.last_use_op, gap.buffer_id)))


def no_overhead(trace: Trace, machine: Machine, gaps: tuple[Gap, ...]) -> NoOverhead:
    """Schedule swaps over these gaps without any waiting, in a steady state of equal steps.

    Args:
        trace: A priced trace.
        machine: Whose host link carries one copy out and one copy back at a time.
        gaps: At most one at a time of each buffer.
    """
    start_s, num_ops = start_times_s(trace), len(trace.ops)
    step_s = float(start_s[-1])
    twice_s = np.concatenate((start_s[:-1], step_s + start_s))
    out_order = sorted(range(len(gaps)), key=lambda index: (gaps[index].last_use_op, gaps[index].buffer_id))
    in_order = sorted(range(len(gaps)), key=lambda index: (-gaps[index].next_use_op, gaps[index].buffer_id))
    leaves: dict[int, int] = {}
    returns: dict[int, int] = {}
    free_s, latest_s = 0.0, math.inf
    # Twice: what one step leaves on the link at its end is in the way of the next, and the other way round.
    for _ in range(2):
        free_s = max(0.0, free_s - step_s)
        for index in out_order:
            free_s = max(free_s, float(start_s[gaps[index].last_use_op + 1])) + out_s(machine, gaps[index].size_bytes)
            leaves[index] = int(np.searchsorted(twice_s, free_s, side="left"))
        latest_s += step_s
        for index in in_order:
            due_s = min(latest_s, float(twice_s[gaps[index].next_use_op]))
            latest_s = due_s - in_s(machine, gaps[index].size_bytes)
            returns[index] = int(np.searchsorted(twice_s, max(latest_s, 0.0), side="right")) - 1
    load, absences = IdealLoad(trace), list[Absence]()
    plain_peak_bytes = load.peak_bytes
    for index, gap in enumerate(gaps):
        leave, back = leaves[index], min(returns[index], gap.next_use_op)
        if leave >= back:
            continue
        load.load_bytes[leave : min(back, num_ops)] -= gap.size_bytes
        load.load_bytes[max(leave - num_ops, 0) : max(back - num_ops, 0)] -= gap.size_bytes
        absences.append(
            Absence(
                buffer_id=gap.buffer_id,
                last_use_op=gap.last_use_op,
                next_use_op=gap.next_use_op,
                action="swap",
                leave_op=leave,
                return_op=back,
            )
        )
    header = PlanHeader(
        planner="autoswap",
        effort="no-overhead",
        decision_class="all",
        machine=machine.name,
        budget_bytes=load.peak_bytes,
        num_ops=num_ops,
        num_buffers=len(trace.buffers),
    )
    absences.sort(key=lambda absence: (absence.last_use_op, absence.buffer_id))
    plan = Plan(header=header, absences=tuple(absences))
    return NoOverhead(peak_bytes=load.peak_bytes, plain_peak_bytes=plain_peak_bytes, plan=plan)


def reduction(trace: Trace, machine: Machine, score: Score) -> NoOverhead:
    """Return the least peak that a score reaches without any waiting ("no-overhead").

    A lower limit makes the score pick more, which does not always lower the peak that follows: the limits between the
    peak and what swapping every candidate would leave on paper are tried, evenly spaced.

    Args:
        trace: A priced trace.
        machine: Whose host link carries the copies.
        score: The score.
    """
    candidates = Candidates(trace, machine, gaps_of_variables(trace, min_size_bytes=MIN_BYTES))
    everything = IdealLoad(trace)
    peak_bytes = everything.peak_bytes
    for gap in candidates.gaps:
        everything.leave(gap)
    best = no_overhead(trace, machine, ())
    for step in range(1, _NUM_LIMITS + 1):
        limit = peak_bytes - (peak_bytes - everything.peak_bytes) * step // _NUM_LIMITS
        found = no_overhead(trace, machine, candidates.chosen(score, limit))
        if found.peak_bytes < best.peak_bytes:
            best = found
    return best


def _uses(trace: Trace, buffers: dict[int, Buffer]) -> dict[int, set[int]]:
    """Return the ops that write or read each of these buffers."""
    uses = {id_: {buffer.birth_op} - {BEFORE_STEP} for id_, buffer in buffers.items()}
    for op in trace.ops:
        for id_ in op.reads:
            if id_ in uses:
                uses[id_].add(op.index)
    return uses
