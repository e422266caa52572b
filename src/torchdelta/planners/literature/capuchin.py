"""`capuchin`: swap while it is hidden, then whichever of swap and recompute costs less (Peng et al., ASPLOS 2020).

Candidates are the saved tensors that are alive while the load is above the budget. First they are swapped in order of
*free time*, the time between the copy out and the copy back, for as long as a swap can be hidden and its copy back
starts outside of the time above the budget. Then, pick by pick, the swap with the least stall is compared with the
recomputation of the largest *memory saving per second* (MSPS, bytes / recompute time), whose times and sources are
brought up to date after each pick.

Our reading, from descriptions of the paper and not from its code: free time is what the link has left given the swaps
already picked (the paper's run-time feedback, which moves each copy back to earlier where it came late, has no other
meaning for a plan). Class *saved*. At most n picks with O(n) prices each.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.planners.literature.ideal import IdealLoad, LinkSlack, in_s, out_s, start_times_s
from torchdelta.planners.literature.lineage import Lineage, register_by_lineage
from torchdelta.planners.literature.lower_limit import NoChoiceError
from torchdelta.simulate.gaps import Gap
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem

__all__ = ["RecomputeTimes"]


class RecomputeTimes:
    """The time to make each buffer again from what is there, given which were dropped. Mutable."""

    def __init__(self, relations: Lineage) -> None:
        self._relations = relations
        self._dropped: set[int] = set()
        self.times_s = relations.cost_s.copy()

    def drop(self, buffer_id: int) -> None:
        """Drop a buffer, and bring the times of all that would be made from it up to date."""
        self._dropped.add(buffer_id)
        below, stack = set[int](), [buffer_id]
        while stack:
            for child in self._relations.children[stack.pop()]:
                if child not in below:
                    below.add(child)
                    if child in self._dropped:
                        stack.append(child)
        for child in sorted(below):
            self.times_s[child] = self._time_s(child)

    def _time_s(self, buffer_id: int) -> float:
        """Return the time of the whole missing chain; what was dropped on the way is made once."""
        seen, stack = {buffer_id}, [buffer_id]
        while stack:
            for parent in self._relations.parents[stack.pop()]:
                if parent in self._dropped and parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return float(sum(self._relations.cost_s[id_] for id_ in sorted(seen)))


def _choose(problem: PlanningProblem, machine: Machine, relations: Lineage, limit_bytes: int) -> NDArray[np.int8]:
    load = IdealLoad(problem.trace)
    start_s = start_times_s(problem.trace)
    above = np.flatnonzero(load.load_bytes > limit_bytes)
    slack = LinkSlack(problem.trace, machine, load.peak_op)
    codes = problem.keep_all()
    if not len(above):
        return codes
    first, last = int(above[0]), int(above[-1])
    candidates = [
        index
        for index, gap in enumerate(problem.gaps)
        if gap.last_use_op < last and gap.next_use_op > first and gap.last_use_op < load.peak_op < gap.next_use_op
    ]

    def free_s(index: int) -> float:
        gap = problem.gaps[index]
        gap_s = float(start_s[min(gap.next_use_op, len(start_s) - 1)] - start_s[gap.last_use_op + 1])
        return gap_s - out_s(machine, gap.size_bytes) - in_s(machine, gap.size_bytes)

    def starts_outside(gap: Gap) -> bool:
        copy_back_s = float(start_s[min(gap.next_use_op, len(start_s) - 1)]) - in_s(machine, gap.size_bytes)
        return copy_back_s >= float(start_s[last + 1])

    for index in sorted(candidates, key=lambda index: (-free_s(index), index)):
        gap = problem.gaps[index]
        if load.peak_bytes <= limit_bytes:
            return codes
        if free_s(index) > 0 and slack.stall_s(gap) <= 0 and starts_outside(gap):
            codes[index] = Code.SWAP
            load.leave(gap)
            slack.book(gap)
    times = RecomputeTimes(relations)
    while load.peak_bytes > limit_bytes:
        moment = load.peak_op
        slack = slack.at(moment)
        rest = [
            index
            for index, gap in enumerate(problem.gaps)
            if codes[index] == Code.KEEP and gap.last_use_op < moment < gap.next_use_op
        ]
        if not rest:
            raise NoChoiceError
        swap_s, swapped = min((slack.stall_s(problem.gaps[index]), index) for index in rest)
        droppable = [index for index in rest if problem.gaps[index].can_recompute_at_use]
        dropped = max(droppable, key=lambda index: _msps(times, problem.gaps[index]), default=-1)
        if dropped >= 0 and times.times_s[problem.gaps[dropped].buffer_id] < swap_s:
            codes[dropped] = Code.RECOMPUTE
            load.leave(problem.gaps[dropped])
            times.drop(problem.gaps[dropped].buffer_id)
        else:
            codes[swapped] = Code.SWAP
            load.leave(problem.gaps[swapped])
            slack.book(problem.gaps[swapped])
    return codes


def _msps(times: RecomputeTimes, gap: Gap) -> float:
    return gap.size_bytes / max(float(times.times_s[gap.buffer_id]), 1e-12)


register_by_lineage("capuchin", _choose)
