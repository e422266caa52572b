"""`delta-2022`: the filter and the director of DELTA (Tang et al., arXiv 2203.15980, 2022), as described.

When an allocation does not fit, the *filter* picks the tensor with the largest bytes x staleness, and the *director*
its action: recompute if the copy out and back, 2 x bytes / bandwidth, takes longer than the op that made it; else swap.
Both in one unit of time (which the published code gets wrong: `delta_2022_released.py`), transfers beside compute, and
swapped tensors fetched ahead of need.

Our reading, where the text is not public: the formula of the filter is the published code's; prefetch is the
simulator's, which brings back first what is used first and as early as memory allows (the paper's queue of five is
first-in-first-out, and backward needs the reverse). Played offline as [Note] of `online.py` says, in every gap of every
buffer (class *extended*), under a hard budget.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.lower_limit import choose_within_budget
from torchdelta.planners.literature.online import Play, frugal, play
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["Director", "FilterAndDirector", "plan"]

Director = Callable[[int, float], bool]
"""From bytes and the seconds of the op that made them to whether they are recomputed."""


@register("delta-2022", "extended")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Let the largest and stalest leave, by the action that is cheaper alone, until the step fits.

    Raises:
        InfeasibleError: No plan within the budget was found.
    """
    problem = PlanningProblem.of(trace, machine, decision_class="extended")

    def recomputes(size_bytes: int, op_s: float) -> bool:
        out_s = machine.link_latency_s + size_bytes / machine.host_out_bytes_per_s
        return out_s + machine.link_latency_s + size_bytes / machine.host_in_bytes_per_s > op_s

    def choose(limit_bytes: int) -> NDArray[np.int8]:
        codes = play(trace, problem.gaps, limit_bytes, FilterAndDirector(trace, recomputes))
        return frugal(problem, codes, budget_bytes)

    outcome = choose_within_budget(problem, budget_bytes, choose)
    return feasible_plan(problem, outcome.codes, budget_bytes, planner="delta-2022", least_bytes=outcome.least_bytes)


class FilterAndDirector:
    """DELTA 2022's two steps. Mutable (it remembers who was swapped); one play long."""

    def __init__(self, trace: Trace, director: Director, *, swaps_again: bool = False) -> None:
        self._director = director
        self._swaps_again = swaps_again
        self._op_s = {id_: op.time_s for op in trace.ops for id_ in op.writes}
        self._was_swapped: set[int] = set()

    def scores(self, state: Play, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return minus bytes x staleness."""
        return -state.size_bytes[candidates] * (state.clock_s - state.last_access_s[candidates] + 1e-9)

    def action(self, state: Play, buffer_id: int) -> int:
        """Recompute what the director says and the trace allows."""
        gap = state.gaps[int(state.open_gap[buffer_id])]
        swaps = self._swaps_again and buffer_id in self._was_swapped
        if gap.can_recompute and not swaps and self._director(gap.size_bytes, self._op_s[buffer_id]):
            return int(Code.RECOMPUTE)
        self._was_swapped.add(buffer_id)
        return int(Code.SWAP)

    def left(self, state: Play, buffer_id: int) -> None:
        """Nothing to note."""

    def came_back(self, state: Play, buffer_id: int) -> None:
        """Nothing to note."""
