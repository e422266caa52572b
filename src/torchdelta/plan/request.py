"""What a process that trains asks its planning helper (`planners/helper.py`), and the answer: lines of JSON."""

from typing import Literal

import msgspec

from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass

__all__ = ["Answer", "Request"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A step to plan: the file of its trace, whose ops carry measured times, and the file that the plan goes to.

    A planner without `decision_class` uses its default class; so does None.
    """

    trace_path: str
    plan_path: str
    machine: Machine
    budget_bytes: int
    planner: str
    decision_class: DecisionClass | None
    effort: Literal["fast", "best"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is predicted to cost, or why there is none: `error` is one line, empty if the plan was written."""

    error: str = ""
    time_s: float = 0.0
    plain_time_s: float = 0.0
    peak_bytes: int = 0
