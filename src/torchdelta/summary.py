"""What a budget did, as immutable data for users, logs and files. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchdelta.units import format_bytes

__all__ = ["StepSummary", "Summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """One training step: bytes that left the device and came back, and the time that it cost.

    Attributes:
        index: Position of the step in its scope, from 0.
        time_s: Wall time from the end of the previous step (or the start of the scope) to the end of this one.
        peak_bytes: Most bytes of storages known to the runtime at once.
        kept_bytes: Saved bytes that were never evicted.
        swapped_out_bytes: Bytes written to the tier.
        recomputed_bytes: Bytes brought back by replay.
        stall_s: Time that the training thread waited for the tier.
        recompute_s: Time spent on replays.
    """

    index: int
    time_s: float
    peak_bytes: int
    kept_bytes: int
    swapped_out_bytes: int
    recomputed_bytes: int
    stall_s: float
    recompute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Totals since the budget was last started, and its steps.

    `budget_bytes` is None if decisions are forced, which ignores the budget. `num_refused_steps` counts the steps that
    ended in a BudgetError; they are not among `steps`.
    """

    budget_bytes: int | None
    peak_bytes: int
    kept_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    recomputed_bytes: int
    num_recomputed_ops: int
    stall_s: float
    recompute_s: float
    num_refused_steps: int = 0
    steps: tuple[StepSummary, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the totals, then a table of the first three steps and the last one."""
        budget = "none (decisions are forced)" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        over_bytes = 0 if self.budget_bytes is None else max(0, self.peak_bytes - self.budget_bytes)
        of_budget = (
            f"PASSED the budget of {budget} by {format_bytes(over_bytes)}" if over_bytes else f"of budget {budget}"
        )
        refused = f", {self.num_refused_steps} refused" if self.num_refused_steps else ""
        lines = [
            f"peak {format_bytes(self.peak_bytes)} {of_budget}; {len(self.steps)} steps{refused}",
            (
                f"kept {format_bytes(self.kept_bytes)}, swapped out {format_bytes(self.swapped_out_bytes)}, "
                f"recomputed {format_bytes(self.recomputed_bytes)} in {self.num_recomputed_ops} ops"
            ),
            f"stalled {self.stall_s:.3f} s, recomputing {self.recompute_s:.3f} s",
        ]
        if not self.steps and not self.num_refused_steps:
            lines.append("no training step was seen on this thread")
        elif (
            not self.num_refused_steps
            and self.swapped_out_bytes == 0
            and self.num_recomputed_ops == 0
            and not over_bytes
        ):
            lines.append("the steps fit: nothing was evicted, recording is the only cost")
        if self.steps:
            lines.append(
                f"{'step':>6} {'time s':>9} {'peak':>12} {'kept':>12} {'swapped':>12} {'recomputed':>12} {'stall s':>9}"
            )
            shown = self.steps if len(self.steps) <= 4 else (*self.steps[:3], self.steps[-1])
            lines.extend(
                f"{step.index:>6} {step.time_s:>9.3f} {format_bytes(step.peak_bytes):>12} "
                f"{format_bytes(step.kept_bytes):>12} "
                f"{format_bytes(step.swapped_out_bytes):>12} {format_bytes(step.recomputed_bytes):>12} "
                f"{step.stall_s:>9.3f}"
                for step in shown
            )
        return "\n".join(lines)
