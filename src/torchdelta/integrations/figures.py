"""The figures of some steps of a training, as the integrations log them. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.budget import MemoryBudget
    from torchdelta.summary import StepSummary, Totals

__all__ = ["Figures", "planned_time_s"]

_GIB: Final = 2**30


@dataclass(slots=True)
class Figures:
    """Totals of some steps of a framework. Mutable.

    Attributes:
        num_steps: What the framework calls steps; the following figures are logged for one of them.
        num_passes: The budget's steps in them: under gradient accumulation, each forward and backward is one.
        time_s: Time of these steps, without what happens between them, such as loading data, evaluation and saving.
        op_time_s: Time of the program's own ops in them.
        peak_bytes: Most bytes of tensors at once.
        swapped_out_bytes: Bytes written to the tier.
        stall_s: Time that the training waited for the tier.
        recompute_s: Time spent on replays.
    """

    num_steps: int = 0
    num_passes: int = 0
    time_s: float = 0.0
    op_time_s: float = 0.0
    peak_bytes: int = 0
    swapped_out_bytes: int = 0
    stall_s: float = 0.0
    recompute_s: float = 0.0

    def add(self, time_s: float, before: Totals, after: Totals, summaries: Iterable[StepSummary]) -> None:
        """Add a step.

        `before` and `after` are `MemoryBudget.totals()` at its begin and end; the summaries are of the budget's
        steps in it. There may be none: if a GradScaler skips the optimizer, the budget's step ends in the next forward.
        """
        self.num_steps += 1
        self.num_passes += after.num_steps - before.num_steps
        self.time_s += time_s
        self.op_time_s += after.op_time_s - before.op_time_s
        self.peak_bytes = max([self.peak_bytes, after.present_peak_bytes, *(each.peak_bytes for each in summaries)])
        self.swapped_out_bytes += after.swapped_out_bytes - before.swapped_out_bytes
        self.stall_s += after.stall_s - before.stall_s
        self.recompute_s += after.recompute_s - before.recompute_s

    def values(self, planned_time_s: float | None = None) -> dict[str, float]:
        """Return them by the names under which they are logged; nothing if there was no step.

        Args:
            planned_time_s: Time of the ops of a step that follows a plan, whose ops in backward may not be watched.
        """
        if not self.num_steps:
            return {}
        plain_time_s = self.op_time_s if planned_time_s is None else planned_time_s * self.num_passes
        values = {
            "peak_gib": self.peak_bytes / _GIB,
            "slowdown": self.time_s / plain_time_s if plain_time_s > 0 else 1.0,
            "stall_ms": self.stall_s * 1e3 / self.num_steps,
            "recompute_ms": self.recompute_s * 1e3 / self.num_steps,
            "swapped_gib": self.swapped_out_bytes / _GIB / self.num_steps,
        }
        return {f"torchdelta/{name}": round(value, 6) for name, value in values.items()}


def planned_time_s(budget: MemoryBudget | None) -> float | None:
    """Return the time of the ops of a step that follows a plan; None if none did so far.

    The ops of such a step's backward may not be watched, so their time is not among the totals.
    """
    if budget is None or not budget.totals().num_followed_steps:
        return None
    follow = budget.summary().follow
    return follow.plain_time_s if follow is not None else None
