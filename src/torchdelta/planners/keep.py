"""`keep`: nothing leaves. What a step costs without any of this, and the plan where the step fits."""

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["plan"]


@register("keep")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Keep every buffer where it is."""
    problem = PlanningProblem.of(trace, machine)
    return feasible_plan(problem, problem.keep_all(), budget_bytes, planner="keep")
