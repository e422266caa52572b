"""What a plan would cost: a deterministic simulation of one step on one machine.

Needs numpy and numba (`pip install torchdelta[plan]`).
"""

from torchdelta.simulate.execute import execute
from torchdelta.simulate.model import Decision, Options, Score, Simulation
from torchdelta.simulate.plans import decisions_of, simulate_plan
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.simulate.run import schedule, simulate

__all__ = [
    "Decision",
    "Options",
    "PlanningProblem",
    "Score",
    "Simulation",
    "decisions_of",
    "execute",
    "schedule",
    "simulate",
    "simulate_plan",
]
