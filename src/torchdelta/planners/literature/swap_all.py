"""`swap-all`: every tensor that autograd saved goes to the host, as vDNN and `save_on_cpu` do.

The plainest way to a small peak, and what a better plan is measured against: it does not ask whether the link carries
it.
"""

import numpy as np

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.problem_within import least_that_fits, problem_within
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.trace.model import Trace

__all__ = ["plan"]


@register("swap-all")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Swap every candidate of the class *saved*, whether the budget asks for it or not."""
    problem = problem_within(trace, machine, budget_bytes)
    codes = np.full(len(problem.gaps), int(Code.SWAP), dtype=np.int8)
    fits = problem.score(codes, budget_bytes).is_feasible
    least_bytes = None if fits else least_that_fits(problem)
    return feasible_plan(problem, codes, budget_bytes, planner="swap-all", least_bytes=least_bytes)
