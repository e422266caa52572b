"""Asks the planner what the first planned step would cost in larger budgets, for the summary."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from torchdelta.errors import TraceFileError
from torchdelta.trace.model import peak

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.plan.request import Answer
    from torchdelta.runtime.follow.asked import Asked
    from torchdelta.runtime.follow.planning import Planning

__all__ = ["OtherBudgets"]

_SHARES: Final = (1 / 3, 2 / 3)  # of the way from the budget to the peak of the plain step


class OtherBudgets:
    """The first planned step's predicted overhead, in the budget of the session and in larger ones. Mutable.

    It is one step's: where lengths vary, others cost more or less.

    Args:
        budget_bytes: The budget of the session.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.overheads: dict[int, float] = {}
        self._asked: list[tuple[int, Asked]] = []  # a budget, and what was asked for it, without an answer

    def ask(self, planning: Planning, asked: Asked, machine: Machine, answer: Answer) -> None:
        """Ask what a step would cost in two larger budgets. The answers have this object as their key.

        Args:
            planning: Takes the requests.
            asked: What the step's own plan was asked for.
            machine: Whose links are used.
            answer: What it is predicted to cost in the budget of the session.
        """
        self._note(self.budget_bytes, answer)
        trace = asked.step[0]
        plain_bytes = peak(trace, with_workspace=True).size_bytes + asked.unseen_bytes
        for share in _SHARES:
            budget_bytes = self.budget_bytes + int(share * (plain_bytes - self.budget_bytes))
            if budget_bytes <= self.budget_bytes:
                return
            planned_bytes = budget_bytes - asked.margin_bytes
            larger = msgspec.structs.replace(machine, memory_bytes=budget_bytes)
            with contextlib.suppress(OSError, TraceFileError):  # the summary then says less
                planned = asked.planned_for(larger, planned_bytes)
                planning.ask(self, planned.planned_step[0], planned.machine or larger, planned_bytes)
                self._asked.append((budget_bytes, planned))

    def add(self, answer: Answer) -> None:
        """Take the answer to the first request that has none yet."""
        budget_bytes, asked = self._asked.pop(0)
        self._note(budget_bytes, asked.complete(answer))

    def _note(self, budget_bytes: int, answer: Answer) -> None:
        if not answer.error and answer.plain_time_s > 0:
            self.overheads[budget_bytes] = answer.time_s / answer.plain_time_s - 1
