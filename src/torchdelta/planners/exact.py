"""`exact`: the best plan of the class *saved* for a step with few candidates, and a MILP bound; both to test others.

The planner tries every combination of keep, swap and recompute in the simulator: 3^n simulations, so at most ten
candidates. `milp_bound` is the linear program of `lp_bound.py` with whole decisions and every moment above the budget:
at least the LP's bound, at most the true optimum.
"""

from itertools import product

import numpy as np

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.lp_bound import Bound, bound
from torchdelta.planners.outcome import finished
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["MAX_CANDIDATES", "milp_bound", "plan"]

MAX_CANDIDATES = 10


@register("exact")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Try every combination of keep, swap and recompute.

    Raises:
        InfeasibleError: It is proved that no plan of the class *saved* fits.
        PlanError: There are too many candidates.
    """
    problem = Problem.of(trace, machine)
    if len(problem.gaps) > MAX_CANDIDATES:
        raise PlanError(
            f"exact: {len(problem.gaps)} candidates are more than the {MAX_CANDIDATES} of which every combination can "
            "be tried; use 'torchdelta'"
        )
    actions = [
        (Code.KEEP, Code.SWAP, Code.RECOMPUTE) if gap.can_recompute else (Code.KEEP, Code.SWAP) for gap in problem.gaps
    ]
    best, best_s, least_bytes, smallest = None, float("inf"), None, problem.keep_all()
    for combination in product(*actions):
        codes = np.array([int(code) for code in combination], dtype=np.int8)
        score = problem.score(codes, budget_bytes)
        if score.is_feasible and score.time_s < best_s:
            best, best_s = codes, score.time_s
        if score.time_s < float("inf") and (least_bytes is None or score.peak_bytes < least_bytes):
            least_bytes, smallest = score.peak_bytes, codes
    codes = smallest if best is None else best
    return finished(problem, codes, budget_bytes, planner="exact", least_bytes=least_bytes)


def milp_bound(trace: Trace, machine: Machine, budget_bytes: int) -> Bound:
    """Return the bound with whole decisions, at every moment above the budget. For small traces.

    Raises:
        PlanError: The solver failed, or highspy is not installed.
    """
    return bound(trace, machine, budget_bytes, num_moments=len(trace.ops), integral=True, min_candidate_bytes=1)
