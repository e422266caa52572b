"""Planners that choose among the saved tensors by what recomputing each would cost: what they have in common."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.lineage import Lineage, lineage
from torchdelta.planners.outcome import finished
from torchdelta.planners.tighten import tighten
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["ChooseByLineage", "plan_by_lineage"]

ChooseByLineage = Callable[[Problem, Machine, Lineage, int], NDArray[np.int8]]
"""From a problem, its machine, who is made from whom, and a limit in bytes to one code a gap."""


def plan_by_lineage(planner: str, choose: ChooseByLineage, trace: Trace, machine: Machine, budget_bytes: int) -> Plan:
    """Return the plan of a choice, made under limits that are tightened until it holds the budget.

    Raises:
        InfeasibleError: No plan within the budget was found.
    """
    problem = Problem.of(trace, machine)
    relations = lineage(trace, {gap.buffer_id for gap in problem.gaps})
    outcome = tighten(problem, budget_bytes, lambda limit_bytes: choose(problem, machine, relations, limit_bytes))
    return finished(problem, outcome.codes, budget_bytes, planner=planner, least_bytes=outcome.least_bytes)
