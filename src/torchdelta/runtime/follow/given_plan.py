"""A plan that the user gives, from a file or from Python, and the check that it fits the traced step.

A plan names ops and buffers by their index in a trace that is numbered by use (`trace/numbering.py`). The plan is
accepted for the step that the session has traced if the step has as many ops and buffers, if the validator finds that
every absence and replay fits the step, and if the plan holds the session's budget there. The budget that the plan was
made for does not matter. Of tensors that the step does not use, only the bytes matter.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from torchdelta.errors import ConfigError
from torchdelta.notices import warn_once
from torchdelta.plan.file import read_plan
from torchdelta.plan.model import Plan
from torchdelta.plan.request import Answer
from torchdelta.plan.validate import validate
from torchdelta.plan.walk import Walk
from torchdelta.runtime.follow.program import Program
from torchdelta.runtime.follow.schedule import make_schedule
from torchdelta.trace.numbering import num_involved, numbered_by_use
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.runtime.follow.program import Position
    from torchdelta.runtime.follow.schedule import Schedule
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["GivenPlan", "given_plan"]

_logger = logging.getLogger("torchdelta")


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPlan:
    """A plan and where it is from.

    Attributes:
        name: The name of its file, or of the planner that made it.
        plan: The plan.
    """

    name: str
    plan: Plan

    def schedule(self, trace: Trace, log: StepLog, budget_bytes: int) -> tuple[Schedule, int]:
        """Return what carries the plan out in the steps that repeat a traced one, and the peak that it has there.

        Raises:
            PlanError: It is no plan of this step, or does not hold the budget. One line that says what differs.
        """
        trace, new_ids = numbered_by_use(trace)
        plan = self.plan
        num_buffers = num_involved(trace)
        if plan.header.num_ops == len(trace.ops) and plan.header.num_buffers in {num_buffers, num_buffers + 1}:
            num_buffers = len(trace.buffers)  # with and without idle tensors it is the same step
        else:
            num_buffers = plan.header.num_buffers
        header = msgspec.structs.replace(plan.header, budget_bytes=budget_bytes, num_buffers=num_buffers)
        plan = msgspec.structs.replace(plan, header=header)
        validate(trace, plan)
        log = replace(
            log,
            buffer_ids=tuple(new_ids.get(id_, -1) for id_ in log.buffer_ids),
            persistents={new_ids[id_]: key for id_, key in log.persistents.items() if id_ in new_ids},
        )
        peak_bytes = max(moment.held_bytes for moment in Walk(trace, plan).moments())
        return make_schedule(plan, log), peak_bytes

    def program(self, trace: Trace, log: StepLog, position: Position, budget_bytes: int, unseen_bytes: int) -> Program:
        """Return the program of a traced step, which is never planned again.

        Args:
            trace: The step.
            log: Its saves.
            position: Its end.
            budget_bytes: The budget.
            unseen_bytes: Memory outside of known storages.

        Raises:
            PlanError: As `schedule`.
        """
        schedule, peak_bytes = self.schedule(trace, log, budget_bytes)
        return Program(
            schedule=schedule,
            key=position.key,
            start_bytes=position.start_bytes,
            answer=Answer(plain_time_s=math.fsum(op.time_s for op in trace.ops), peak_bytes=peak_bytes),
            step=None,
            margin_bytes=0,
            unseen_bytes=unseen_bytes,
        )

    def report(self, program: Program) -> None:
        """Log that a program of this plan is followed, and how much of the plan it leaves out."""
        num_absences, num_left_out = len(self.plan.absences), program.schedule.num_not_carried_out
        if num_left_out:
            warn_once(
                f"{self.name}: {num_left_out} of {num_absences} absences are not carried out, because "
                "steps follow a plan only for saved tensors between forward and backward, and for parameters, "
                "gradients and optimizer states if decision_class='all'; for the rest, buffers are evicted reactively"
            )
        peak = format_bytes(program.predicted_peak_bytes)
        _logger.info("plan: following %s: %d absences, peak %s", self.name, num_absences, peak)


def given_plan(plan: object) -> GivenPlan:
    """Return a plan that is given as such, or as the path of its file.

    Raises:
        ConfigError: It is neither.
        PlanError: The file cannot be read.
    """
    if isinstance(plan, Plan):
        return GivenPlan(name=f"a plan of {plan.header.planner}", plan=plan)
    if not isinstance(plan, (str, os.PathLike)):
        raise ConfigError(f"plan={plan!r} is not allowed: use the path of a plan file, a Plan, or None")
    path = os.fspath(plan)
    return GivenPlan(name=os.path.basename(path), plan=read_plan(path))  # noqa: PTH119 - os.PathLike of any kind
