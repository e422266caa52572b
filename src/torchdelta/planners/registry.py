"""The planners by name, and by the decision class that they plan in.

A planner's module registers its functions when it is imported; `get` and `names` import the modules that `_MODULES`
lists.
"""

import importlib
from collections.abc import Callable
from typing import Literal, Protocol

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.names import unknown_name
from torchdelta.plan.model import DecisionClass, Plan
from torchdelta.trace.model import Trace

__all__ = ["DEFAULT_EFFORT", "DEFAULT_PLANNER", "Effort", "Planner", "classes_of", "get", "names", "register"]

Effort = Literal["fast", "best"]
"""How long a planner may think; one that knows a single effort ignores it."""

DEFAULT_EFFORT: Effort = "fast"
DEFAULT_PLANNER = "torchdelta"

_MODULES = (
    "keep",
    "default.search_planner",
    "literature.autoswap",
    "literature.capuchin",
    "literature.checkpoint",
    "literature.delta_2022",
    "literature.delta_2022_released",
    "literature.delta_2024",
    "literature.dtr",
    "literature.mu_two",
    "literature.swap_all",
)
"""The modules of this package that hold planners."""

_FORMER_NAMES: dict[str, DecisionClass] = {"torchdelta-extended": "extended", "torchdelta-all": "all"}
"""Names that the default planner had in its larger classes."""


class Planner(Protocol):
    """What every planner is, in one of its decision classes."""

    def __call__(self, trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = DEFAULT_EFFORT) -> Plan:
        """Choose which buffers leave the device, how, and when.

        Deterministic: the same arguments give the same plan, on any machine and however busy it is.

        Args:
            trace: A valid trace whose ops carry their times on `machine` (`machine.roofline.price`).
            machine: Whose links and memories are used.
            budget_bytes: The most bytes on the device at any moment.
            effort: How long to think.

        Raises:
            InfeasibleError: No plan within the budget was found; it names the least budget that was.
        """
        ...


_planners: dict[str, dict[DecisionClass, Planner]] = {}


def register(name: str, decision_class: DecisionClass = "saved") -> Callable[[Planner], Planner]:
    """Return a decorator that registers a planner under a name, for one decision class.

    The class that a name is registered for first is the one that it plans in by default.

    Raises:
        PlanError: The name is taken in that class.
    """

    def add(planner: Planner) -> Planner:
        if decision_class in _planners.get(name, {}):
            raise PlanError(f"two planners are named {name!r} in the class {decision_class!r}: rename one of them")
        _planners.setdefault(name, {})[decision_class] = planner
        return planner

    return add


def get(name: str, decision_class: DecisionClass | None = None) -> Planner:
    """Return the planner of a name.

    Args:
        name: One of `names()`.
        decision_class: One of `classes_of(name)`; None for the first of them.

    Raises:
        PlanError: There is no such planner (the message names the nearest), or it does not plan in that class.
    """
    classes = classes_of(name)
    if decision_class is not None and decision_class not in classes:
        known = ", ".join(map(repr, classes))
        raise PlanError(f"planner {name!r} does not plan in the class {decision_class!r}: use {known}")
    return _planners[name][decision_class or classes[0]]


def classes_of(name: str) -> tuple[DecisionClass, ...]:
    """Return the decision classes that a planner plans in, its default first.

    Raises:
        PlanError: There is no such planner; the message names the nearest.
    """
    _load()
    if name in _FORMER_NAMES:
        wanted = _FORMER_NAMES[name]
        raise PlanError(
            f"planner {name!r} was renamed: use planner {DEFAULT_PLANNER!r} with --class {wanted} "
            f"(in Python, decision_class={wanted!r})"
        )
    if name not in _planners:
        raise PlanError(unknown_name("planner", name, names()))
    return tuple(_planners[name])


def names() -> tuple[str, ...]:
    """Return the names of all planners, sorted."""
    _load()
    return tuple(sorted(_planners))


def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"torchdelta.planners.{module}")
