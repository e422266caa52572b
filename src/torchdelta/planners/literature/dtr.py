"""`dtr`: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021), played on a trace.

When an allocation does not fit, the tensor with the least

    h(t) = (c(t) + sum of the costs of t's evicted neighbourhood) / (bytes(t) * staleness(t))

is dropped, and is made again by its whole missing chain when it is used next. The neighbourhood is the paper's
approximation: classes of evicted tensors in a union-find structure, whose costs are added up where an evicted tensor
joins them and whose splits are never undone when one comes back ("spurious links").

Our reading: *offline*, since the whole step is known: the same victims as online, but each is dropped right after its
last use ([Note] of `online.py`). Every gap of every buffer is open to it (class *extended*), as DTR drops again what it
made again. Without the sampling and the size filter of the prototype, which only save it search time. The budget is a
hard limit here, and is tightened within the planner until the simulator agrees that the plan holds it.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.lineage import Lineage, lineage
from torchdelta.planners.literature.lower_limit import choose_within_budget
from torchdelta.planners.literature.online import Play, frugal, play
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["Dtr", "plan"]


@register("dtr", "extended")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Drop the tensor that is cheapest to make again for its bytes and its staleness, until the step fits.

    Raises:
        InfeasibleError: No plan within the budget was found.
    """
    problem = PlanningProblem.of(trace, machine, decision_class="extended")
    droppable = [index for index, gap in enumerate(problem.gaps) if gap.can_recompute]
    gaps = tuple(problem.gaps[index] for index in droppable)
    relations = lineage(trace, {gap.buffer_id for gap in gaps})

    def choose(limit_bytes: int) -> NDArray[np.int8]:
        codes = problem.keep_all()
        codes[droppable] = play(trace, gaps, limit_bytes, Dtr(relations, len(trace.buffers)))
        return frugal(problem, codes, budget_bytes)

    outcome = choose_within_budget(problem, budget_bytes, choose)
    return feasible_plan(problem, outcome.codes, budget_bytes, planner="dtr", least_bytes=outcome.least_bytes)


class Dtr:
    """DTR's score with the union-find approximation of the neighbourhood. Mutable; one play long."""

    def __init__(self, relations: Lineage, num_buffers: int) -> None:
        self._relations = relations
        self._class_of = np.full(num_buffers, -1, dtype=np.int64)  # -1: not evicted
        self._class_cost_s: list[float] = []
        self._members: list[list[int]] = []

    def scores(self, state: Play, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (own cost + each neighbouring class once) / (bytes x staleness)."""
        cost_s = self._relations.cost_s[candidates] + [self._around_s(int(id_)) for id_ in candidates]
        staleness_s = state.clock_s - state.last_access_s[candidates] + 1e-9
        return cost_s / (np.maximum(state.size_bytes[candidates], 1) * staleness_s)

    def action(self, state: Play, buffer_id: int) -> int:  # noqa: ARG002
        """Drop, always."""
        return int(Code.RECOMPUTE)

    def left(self, state: Play, buffer_id: int) -> None:  # noqa: ARG002
        """Put the buffer into a class of its own and join it with those around it."""
        number = len(self._members)
        self._members.append([buffer_id])
        self._class_cost_s.append(float(self._relations.cost_s[buffer_id]))
        around = self._classes_around(buffer_id)
        self._class_of[buffer_id] = number
        for other in sorted(around):
            self._class_of[self._members[other]] = number
            self._members[number] += self._members[other]
            self._class_cost_s[number] += self._class_cost_s[other]
            self._members[other] = []

    def came_back(self, state: Play, buffer_id: int) -> None:  # noqa: ARG002
        """Take its cost out of its class, which stays whole."""
        number = int(self._class_of[buffer_id])
        if number >= 0:
            self._class_cost_s[number] -= float(self._relations.cost_s[buffer_id])
            self._members[number].remove(buffer_id)
            self._class_of[buffer_id] = -1

    def _classes_around(self, buffer_id: int) -> set[int]:
        around = (*self._relations.parents[buffer_id], *self._relations.children[buffer_id])
        return {number for other in around if (number := int(self._class_of[other])) >= 0}

    def _around_s(self, buffer_id: int) -> float:
        return sum(self._class_cost_s[number] for number in sorted(self._classes_around(buffer_id)))
