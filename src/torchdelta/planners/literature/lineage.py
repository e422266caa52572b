"""What made each buffer: the cost of making it again, and its neighbours among the buffers that may leave.

`register_by_lineage` is for planners that choose among the saved tensors by this cost.
"""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.lower_limit import choose_within_budget
from torchdelta.planners.problem_within import problem_within
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import BEFORE_STEP, Trace

__all__ = ["ChooseByLineage", "Lineage", "lineage", "register_by_lineage"]


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Costs and neighbours.

    Attributes:
        cost_s: Seconds to make each buffer again when the candidates around it are there: its own op, and the ops of
            what lies in between and is no candidate.
        parents: The candidates that it is then made from, by candidate.
        children: The candidates that are made from it, by candidate.
    """

    cost_s: NDArray[np.float64]
    parents: dict[int, tuple[int, ...]]
    children: dict[int, tuple[int, ...]]


def lineage(trace: Trace, candidates: Iterable[int]) -> Lineage:
    """Return costs and neighbours of these buffers, all of them born in the step."""
    chosen = set(candidates)
    producer = {id_: op.index for op in trace.ops for id_ in op.writes}
    cost_s = np.zeros(len(trace.buffers))
    parents: dict[int, tuple[int, ...]] = {}
    children: dict[int, list[int]] = {id_: [] for id_ in chosen}
    for id_ in sorted(chosen):
        if trace.buffers[id_].birth_op == BEFORE_STEP:
            parents[id_] = ()
            continue
        ops, above, stack = {producer[id_]}, set[int](), [producer[id_]]
        while stack:
            for read in trace.ops[stack.pop()].reads:
                if read in chosen:
                    above.add(read)
                # What outlives the step is there in any case.
                elif read in producer and producer[read] not in ops and trace.buffers[read].death_op < len(trace.ops):
                    ops.add(producer[read])
                    stack.append(producer[read])
        cost_s[id_] = sum(trace.ops[op].time_s for op in sorted(ops))
        parents[id_] = tuple(sorted(above - {id_}))
        for parent in parents[id_]:
            children[parent].append(id_)
    return Lineage(
        cost_s=cost_s, parents=parents, children={id_: tuple(below) for id_, below in sorted(children.items())}
    )


ChooseByLineage = Callable[[PlanningProblem, Machine, Lineage, int], NDArray[np.int8]]
"""From a problem, its machine, what each buffer is made from, and a limit in bytes to one code a gap."""


def register_by_lineage(name: str, choose: ChooseByLineage) -> None:
    """Register the planner that has a choice made, under limits that are lowered until it holds the budget."""

    def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
        problem = problem_within(trace, machine, budget_bytes)
        relations = lineage(trace, {gap.buffer_id for gap in problem.gaps})
        found = choose_within_budget(
            problem, budget_bytes, lambda limit_bytes: choose(problem, machine, relations, limit_bytes)
        )
        return feasible_plan(problem, found.codes, budget_bytes, planner=name, least_bytes=found.least_bytes)

    register(name)(plan)
