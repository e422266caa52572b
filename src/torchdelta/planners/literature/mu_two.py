"""`mu-two`: the memory planner of mu-TWO (MLSys 2023) for one model, swap and recompute pick by pick.

While the load on paper is above the limit, the tensor that is idle longest (to swap) is compared with the one that
saves the most bytes a second of recomputation (to recompute), and the one with less overhead leaves. The overhead of a
swap is what its copy back cannot overlap: all of it inside the time above the limit, in which nothing may come back
early; else what the link has no time for. The recomputation times of the others are brought up to date after each pick.

Our reading: candidates are the saved tensors that span the highest moment (class *saved*). The second model whose
forward hides the copies, for which the paper was written, is not there. Quadratic, as published.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.planners.literature.capuchin import RecomputeTimes
from torchdelta.planners.literature.ideal import IdealLoad, LinkSlack, in_s, start_times_s
from torchdelta.planners.literature.lineage import Lineage, register_by_lineage
from torchdelta.planners.literature.lower_limit import NoChoiceError
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem


def _choose(problem: PlanningProblem, machine: Machine, relations: Lineage, limit_bytes: int) -> NDArray[np.int8]:
    load = IdealLoad(problem.trace)
    start_s = start_times_s(problem.trace)
    slack = LinkSlack(problem.trace, machine, load.peak_op)
    times = RecomputeTimes(relations)
    codes = problem.keep_all()
    gaps = problem.gaps
    idle_s = [float(start_s[min(gap.next_use_op, len(start_s) - 1)] - start_s[gap.last_use_op + 1]) for gap in gaps]

    def saving_per_s(index: int) -> float:
        return gaps[index].size_bytes / max(float(times.times_s[gaps[index].buffer_id]), 1e-12)

    while load.peak_bytes > limit_bytes:
        moment = load.peak_op
        slack = slack.at(moment)
        above_until_s = float(start_s[int(np.flatnonzero(load.load_bytes > limit_bytes)[-1]) + 1])
        rest = [i for i, gap in enumerate(gaps) if codes[i] == Code.KEEP and gap.last_use_op < moment < gap.next_use_op]
        if not rest:
            raise NoChoiceError
        swapped = max(rest, key=lambda index: (idle_s[index], -index))
        copy_back_s = in_s(machine, gaps[swapped].size_bytes)
        due_s = float(start_s[min(gaps[swapped].next_use_op, len(start_s) - 1)])
        inside_s = min(max(above_until_s - (due_s - copy_back_s), 0.0), copy_back_s)
        swap_s = max(inside_s, slack.stall_s(gaps[swapped]))
        droppable = [index for index in rest if gaps[index].can_recompute_at_use]
        dropped = max(droppable, key=saving_per_s, default=-1)
        if dropped >= 0 and times.times_s[gaps[dropped].buffer_id] < swap_s:
            codes[dropped] = Code.RECOMPUTE
            load.leave(gaps[dropped])
            times.drop(gaps[dropped].buffer_id)
        else:
            codes[swapped] = Code.SWAP
            load.leave(gaps[swapped])
            slack.book(gaps[swapped])
    return codes


register_by_lineage("mu-two", _choose)
