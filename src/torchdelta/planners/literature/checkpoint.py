"""`checkpoint`: activation checkpointing as people use it; the fastest of its rules that fits is taken.

`checkpoint_rules` has the rules, of `torch.utils.checkpoint`, torchtitan and `torch.compile`. Users choose a rule and
its number by trial; here all are tried. Where none fits and plain does (a replay can meet a wide op with more around
it), everything is kept.
"""

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.checkpoint_rules import decisions
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["plan"]


@register("checkpoint")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Recompute what the fastest rule of checkpointing within the budget recomputes."""
    problem = PlanningProblem.of(trace, machine)
    best, best_s, smallest, least_bytes = None, float("inf"), problem.keep_all(), None
    for codes in decisions(problem):
        score = problem.score(codes, budget_bytes)
        if score.is_feasible and score.time_s < best_s:
            best, best_s = codes, score.time_s
        if least_bytes is None or score.peak_bytes < least_bytes:
            smallest, least_bytes = codes, score.peak_bytes
    keep = problem.keep_all()
    if best is None and problem.score(keep, budget_bytes).is_feasible:
        best = keep
    codes = smallest if best is None else best
    return feasible_plan(problem, codes, budget_bytes, planner="checkpoint", least_bytes=least_bytes)
