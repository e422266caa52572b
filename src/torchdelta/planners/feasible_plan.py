"""From what a planner chose to its plan, or to the error that says why there is none."""

import numpy as np
from numpy.typing import NDArray

from torchdelta.errors import InfeasibleError
from torchdelta.plan.model import Plan
from torchdelta.simulate.model import Simulation
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace
from torchdelta.units import format_bytes

__all__ = ["accepted", "feasible_plan"]


def feasible_plan(
    problem: PlanningProblem,
    codes: NDArray[np.int8],
    budget_bytes: int,
    *,
    planner: str,
    effort: str = "",
    least_bytes: int | None = None,
) -> Plan:
    """Return the plan of these codes if it holds the budget.

    The error names `least_bytes` as the least budget that the planner found; by default the peak of these codes, if the
    host and the disk have room for them.

    Raises:
        InfeasibleError: They do not hold the budget.
    """
    simulation = problem.simulation(codes, budget_bytes, planner=planner, effort=effort)
    return accepted(simulation, problem.trace, planner, least_bytes=least_bytes)


def accepted(simulation: Simulation, trace: Trace, planner: str, *, least_bytes: int | None = None) -> Plan:
    """Return the plan that was simulated.

    `least_bytes`: see `feasible_plan`.

    Raises:
        InfeasibleError: It does not hold the budget.
    """
    score = simulation.score
    if score.is_feasible:
        return simulation.plan
    if score.time_s == float("inf"):
        raise InfeasibleError(
            f"planner {planner}: its decisions drop a buffer that cannot be recomputed when it is used: use another "
            "planner or a larger memory budget",
            least_budget_bytes=None,
        )
    elsewhere_bytes = score.host_excess_bytes or score.disk_excess_bytes
    if elsewhere_bytes and (score.excess_bytes == 0 or least_bytes is None):
        what = "host" if score.host_excess_bytes else "disk"
        raise InfeasibleError(
            f"planner {planner}: the plan exceeds the {what}'s budget by {format_bytes(elsewhere_bytes)}: allow the "
            f"{what} that much more, or use a larger memory budget",
            least_budget_bytes=None,
        )
    op, budget_bytes = trace.ops[score.peak_op], simulation.budget_bytes
    least_bytes = score.peak_bytes if least_bytes is None else least_bytes
    raise InfeasibleError(
        f"planner {planner}: no plan within {format_bytes(budget_bytes)} was found: the least budget found is "
        f"{format_bytes(least_bytes, rounds_up=True)} ({least_bytes} bytes), set by op {op.index} {op.name!r}",
        least_budget_bytes=least_bytes,
    )
