"""The planners by name.

A planner's module registers its functions when it is imported; `get` and `names` import the modules that `_MODULES`
lists.
"""

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal, Protocol

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.simulate.model import Options
from torchdelta.trace.model import Trace

__all__ = ["Effort", "Planner", "get", "names", "options_of", "register"]

Effort = Literal["fast", "best"]
"""How long a planner may think; one that knows a single effort ignores it."""

_MODULES = (
    "keep",
    "default.search_planner",
    *(
        f"literature.{name}"
        for name in (
            "autoswap",
            "capuchin",
            "checkpoint",
            "delta_2022",
            "delta_2022_released",
            "delta_2024",
            "dtr",
            "mu_two",
            "swap_all",
        )
    ),
)
"""The modules of this package that hold planners."""


class Planner(Protocol):
    """What every planner is."""

    def __call__(self, trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:
        """Choose who leaves the device, how, and when.

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


_planners: dict[str, Planner] = {}
_options: dict[str, Options] = {}


def register(name: str, options: Options | None = None) -> Callable[[Planner], Planner]:
    """Return a decorator that registers a planner under a name.

    Args:
        name: The planner's.
        options: How the runtime that it was made for moves tensors, if not as ours.

    Raises:
        PlanError: The name is taken.
    """

    def add(planner: Planner) -> Planner:
        if name in _planners:
            raise PlanError(f"two planners are named {name!r}")
        _planners[name] = planner
        _options[name] = options or Options()
        return planner

    return add


def get(name: str) -> Planner:
    """Return the planner of a name.

    Raises:
        PlanError: There is none; the message names the nearest.
    """
    _load()
    if name not in _planners:
        near = get_close_matches(name, _planners, n=1, cutoff=0.0)
        raise PlanError(f"unknown planner {name!r}; the nearest is {near[0]!r}, all are: {', '.join(names())}")
    return _planners[name]


def options_of(name: str) -> Options:
    """Return how the plans of a planner are to be simulated: ours where the name is not known."""
    _load()
    return _options.get(name, Options())


def names() -> tuple[str, ...]:
    """Return the names of all planners, sorted."""
    _load()
    return tuple(sorted(_planners))


def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"torchdelta.planners.{module}")
