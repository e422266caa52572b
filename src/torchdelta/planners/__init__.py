"""How to choose a plan: one file a planner, all of them functions of one shape, registered by name.

    plan(trace, machine, budget_bytes, effort) -> Plan

Needs numpy and numba (`pip install torchdelta[plan]`).
"""

from torchdelta.planners.registry import Effort, Planner, get, names, options_of, register

__all__ = ["Effort", "Planner", "get", "names", "options_of", "register"]
