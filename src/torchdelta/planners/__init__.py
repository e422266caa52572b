"""How to choose a plan: functions of one shape, registered by name and decision class.

    plan(trace, machine, budget_bytes, effort) -> Plan

`default/` holds ours, `literature/` those of the literature. `plan_step` is the one call from a trace to a plan and
what it costs. Needs numpy and numba (`pip install torchdelta[plan]`).
"""

from torchdelta.planners.prediction import Prediction, plan_step, predict
from torchdelta.planners.registry import (
    DEFAULT_EFFORT,
    DEFAULT_PLANNER,
    Effort,
    Planner,
    classes_of,
    get,
    names,
    register,
)

__all__ = [
    "DEFAULT_EFFORT",
    "DEFAULT_PLANNER",
    "Effort",
    "Planner",
    "Prediction",
    "classes_of",
    "get",
    "names",
    "plan_step",
    "predict",
    "register",
]
