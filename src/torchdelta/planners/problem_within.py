"""The problem that a planner solves: with small buffers only where the budget cannot be held without them.

[Note: small buffers]
Buffers below `MIN_SIZE_BYTES` cost more to handle than they free, so they stay. A step of a small model has none that
are larger, or too few: then smaller ones may leave as well, by quarters, as far as the budget asks for it. Every gap
costs planning time. So no buffer leaves that is smaller than a 4096th of the budget, which leaves a step no more gaps
than some thousand times its peak over the budget; nor one that the runtime would not evict.
"""

from typing import Final

import numpy as np

from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass
from torchdelta.simulate.gaps import MIN_SIZE_BYTES
from torchdelta.simulate.model import Code, Score
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["FINEST_BYTES", "least_peak", "least_that_fits", "problem_within"]

FINEST_BYTES: Final = 4096
"""The runtime evicts nothing smaller."""

_FINEST_SHARE: Final = 4096
_FINER: Final = 4


def problem_within(
    trace: Trace, machine: Machine, budget_bytes: int, *, decision_class: DecisionClass = "saved"
) -> PlanningProblem:
    """Return the problem of a step, with the fewest gaps that can hold a budget. See [Note: small buffers].

    If none can, the one with the most gaps is returned.
    """
    problem = PlanningProblem.of(trace, machine, decision_class=decision_class)
    finest_bytes = _finest_bytes(budget_bytes)
    while least_peak(problem) > budget_bytes and problem.min_size_bytes // _FINER >= finest_bytes:
        finer_bytes = problem.min_size_bytes // _FINER
        problem = PlanningProblem.of(trace, machine, decision_class=decision_class, min_size_bytes=finer_bytes)
    return problem


def least_peak(problem: PlanningProblem) -> int:
    """Return the least peak that is surely found: that of swapping everything.

    Within the class *saved* no plan has a lower one: nothing is away for longer, and no replay adds to it. Whether the
    host has room for it, `least_that_fits` tells.
    """
    return _all_swapped(problem).peak_bytes


def least_that_fits(problem: PlanningProblem) -> int | None:
    """Return the least budget that swapping everything surely holds; None where the host has no room for that.

    It holds when it is asked for: a larger budget leaves fewer small buffers a choice, and then takes more.
    """
    while True:
        score = _all_swapped(problem)
        if score.host_excess_bytes or score.disk_excess_bytes:
            return None
        if problem.min_size_bytes >= min(_finest_bytes(score.peak_bytes), MIN_SIZE_BYTES):
            return score.peak_bytes  # the same buffers have a choice there
        trace, machine, decision_class = problem.trace, problem.machine, problem.decision_class
        problem = problem_within(trace, machine, score.peak_bytes, decision_class=decision_class)


def _finest_bytes(budget_bytes: int) -> int:
    return max(FINEST_BYTES, budget_bytes // _FINEST_SHARE)


def _all_swapped(problem: PlanningProblem) -> Score:
    return problem.score(np.full(len(problem.gaps), Code.SWAP, np.int8), 0)
