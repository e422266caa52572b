"""What a process that trains asks its planning helper (`planners/helper.py`), and the answer: lines of JSON."""

from typing import Literal

import msgspec

from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass

__all__ = ["Answer", "Request"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A step to plan.

    Attributes:
        trace_path: The file of its trace, whose ops carry measured times.
        plan_path: The file that the plan is written to.
        machine: Whose links are used.
        budget_bytes: The most bytes on the device.
        planner: Registered name of the planner.
        decision_class: The class to plan in; None for the planner's own.
        effort: How long to think.
    """

    trace_path: str
    plan_path: str
    machine: Machine
    budget_bytes: int
    planner: str
    decision_class: DecisionClass | None
    effort: Literal["fast", "best"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is predicted to cost, or why there is none.

    Attributes:
        error: One line; empty if the plan was written.
        time_s: Seconds of the step under the plan.
        plain_time_s: Seconds of the step when nothing leaves.
        peak_bytes: Most bytes on the device.
    """

    error: str = ""
    time_s: float = 0.0
    plain_time_s: float = 0.0
    peak_bytes: int = 0
