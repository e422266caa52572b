"""What a plan was asked for: the step, and what its program has to know of its request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from torchdelta.runtime.follow.departures import departures_time_s, with_departures, with_gradients_departing

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.plan.request import Answer
    from torchdelta.runtime.follow.program import Key, Program
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Asked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request for a plan.

    Attributes:
        key: Which step it is.
        start_bytes: The bytes in use at its first save, those of persistent tensors that are away included.
        step: Its trace, and what was logged while it was traced.
        margin_bytes: So much less than the budget was asked for.
        num_plans: How many plans of this step were asked for, with this one.
        unseen_bytes: Bytes in use that no trace shows.
        replaces: The program that the step has so far; None if it has none.
        machine: What it is planned for; None until it is asked.
        departing_step: The step in which gradients depart after the optimizer has read them; None if none does.
        may_depart: Whether they may.
    """

    key: Key
    start_bytes: int
    step: tuple[Trace, StepLog]
    margin_bytes: int
    num_plans: int
    unseen_bytes: int
    replaces: Program | None = None
    machine: Machine | None = None
    departing_step: tuple[Trace, StepLog] | None = None
    may_depart: bool = True

    @classmethod
    def again(cls, program: Program, step: tuple[Trace, StepLog]) -> Asked:
        """Return the request for one more plan of a program's step."""
        return cls(
            key=program.key,
            start_bytes=program.start_bytes,
            step=step,
            margin_bytes=program.margin_bytes,
            num_plans=program.num_plans,
            unseen_bytes=program.unseen_bytes,
            replaces=program,
        )

    def planned_for(self, machine: Machine, budget_bytes: int) -> Asked:
        """Return this request for a machine and a budget from which the margin is subtracted."""
        step = with_gradients_departing(*self.step, machine, budget_bytes) if self.may_depart else None
        capacity_bytes = machine.host_memory_bytes
        if step is not None and capacity_bytes is not None:
            left_bytes = capacity_bytes - sum(each.size_bytes for each in step[1].departures)
            if left_bytes < capacity_bytes // 2:
                step = None  # the swaps of the plan need the tier
            else:
                machine = structs.replace(machine, host_memory_bytes=left_bytes)
        return replace(self, machine=machine, departing_step=step)

    @property
    def planned_step(self) -> tuple[Trace, StepLog]:
        """The step that the planner gets."""
        return self.departing_step or self.step

    def complete(self, answer: Answer) -> Answer:
        """Return the planner's answer with what departures take, which no plan counts."""
        _, log = self.planned_step
        if self.machine is None or not log.departures or not answer.time_s:
            return answer
        return structs.replace(answer, time_s=answer.time_s + departures_time_s(log, self.machine))

    def without_departing_gradients(self) -> Asked | None:
        """Return this request for the step in which gradients stay; None if none departs."""
        return replace(self, may_depart=False) if self.departing_step is not None else None

    def with_departures(self) -> Asked | None:
        """Return the request for this step in which tensors without a next use depart; None if there are none."""
        step = with_departures(*self.step) if not self.step[1].departures else None
        return replace(self, step=step, num_plans=self.num_plans + 1) if step is not None else None

    def without_margin(self) -> Asked | None:
        """Return this request for all of the budget that a plan can use; None if it is not the first one."""
        return replace(self, margin_bytes=self.unseen_bytes, num_plans=2) if self.num_plans == 1 else None
