"""Reports what a session did: its summary and its log lines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchdelta.summary import Summary
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.summary import FollowSummary

__all__ = ["log_first_step", "log_result", "summarize"]

_logger = logging.getLogger("torchdelta")


def summarize(room: Room, steps: StepTracker, follow: FollowSummary | None = None) -> Summary:
    """Return the summary so far."""
    counters = room.counters
    evicted_bytes = counters.swapped_out_bytes + counters.dropped_bytes
    return Summary(
        budget_bytes=room.budget_bytes,
        peak_bytes=max(steps.peak_bytes, room.usage.peak_bytes),
        kept_bytes=max(0, counters.saved_bytes - evicted_bytes),
        swapped_out_bytes=counters.swapped_out_bytes,
        swapped_in_bytes=counters.swapped_in_bytes,
        recomputed_bytes=counters.recomputed_bytes,
        num_recomputed_ops=counters.num_recomputed_ops,
        stall_s=counters.stall_s,
        recompute_s=counters.recompute_s,
        num_refused_steps=steps.num_refused,
        steps=steps.summaries,
        follow=follow,
    )


def log_result(summary: Summary) -> None:
    """Log a summary's first line when a scope ends; as a warning if the peak exceeded the budget."""
    is_over = summary.budget_bytes is not None and summary.peak_bytes > summary.budget_bytes
    _logger.log(logging.WARNING if is_over else logging.INFO, "result: %s", str(summary).splitlines()[0])
    if not summary.steps and not summary.num_refused_steps:
        _logger.info("no training step was seen on this thread")


def log_first_step(room: Room, steps: StepTracker, policy: str, budget_bytes: int) -> None:
    """Log what the first step took, and whether any buffer was evicted."""
    counters = room.counters
    _logger.info(
        "recorded a step: %d ops, %d saved tensors, peak %s of %s",
        counters.num_ops,
        counters.num_saved,
        format_bytes(steps.peak_bytes),
        format_bytes(budget_bytes),
    )
    if room.ledger.late_bytes:
        _logger.info(
            "%s of parameters were not found when the scope opened and counted from their first use",
            format_bytes(room.ledger.late_bytes),
        )
    if counters.num_evictions == 0 and steps.peak_bytes <= budget_bytes:
        _logger.info("the step fits: nothing was evicted, recording is the only cost")
    else:
        _logger.info(
            "policy %s: %s swapped out, %s dropped to be recomputed",
            policy,
            format_bytes(counters.swapped_out_bytes),
            format_bytes(counters.dropped_bytes),
        )
