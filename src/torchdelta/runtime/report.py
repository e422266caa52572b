"""Reports what a session did: its summary and its log lines.

At INFO a run has four: "start", "first step", "plan" when one is first followed (in follow/programs.py), and "result".
Rare events that the user should know of (native code that is built, a subclass that stays) have a line, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchdelta.summary import Summary, least_slowdown, most_slowdown
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    import torch

    from torchdelta.config import Config
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.summary import FollowSummary, PlainPeak

__all__ = ["log_first_step", "log_result", "log_start", "summarize"]

_logger = logging.getLogger("torchdelta")


def summarize(
    room: Room,
    steps: StepTracker,
    budget_bytes: int | None,
    follow: FollowSummary | None = None,
    plain_peak: PlainPeak | None = None,
) -> Summary:
    """Return the summary so far."""
    counters = room.counters
    latest = steps.summaries
    mostly_followed = follow if follow is not None and 2 * follow.num_followed_steps > steps.num_steps else None
    return Summary(
        budget_bytes=budget_bytes,
        # From the end of the scope on there is no budget any more, and what had left comes back.
        peak_bytes=steps.peak_bytes if room.ledger.is_closing else max(steps.peak_bytes, room.usage.peak_bytes),
        kept_bytes=max(0, counters.saved_bytes - counters.left_bytes),
        swapped_out_bytes=counters.swapped_out_bytes,
        swapped_in_bytes=counters.swapped_in_bytes,
        recomputed_bytes=counters.recomputed_bytes,
        num_recomputed_ops=counters.num_recomputed_ops,
        stall_s=counters.stall_s,
        recompute_s=counters.recompute_s,
        evict_s=counters.evict_s,
        num_refused_steps=steps.num_refused,
        steps=latest,
        follow=follow,
        num_steps=steps.num_steps,
        num_optimizer_steps=steps.num_optimizer_steps,
        num_unrecorded_steps=steps.num_unrecorded,
        had_other_optimizers=steps.had_other_optimizers,
        first_had_optimizer=steps.first_had_optimizer,
        startup_s=steps.startup_s,
        slowdown_at_least=least_slowdown(latest),
        slowdown_at_most=most_slowdown(latest) if mostly_followed is None else mostly_followed.slowdown,
        plain_peak=plain_peak,
    )


def log_start(config: Config, budget_bytes: int, device: torch.device) -> None:
    """Log what begins: the first of the lines that a run has at INFO."""
    if config.decisions is not None:
        _logger.info("start: no budget, the decisions are forced, on %s", device)
        return
    is_named = config.planner not in (None, "auto")
    how = f"plans of {config.planner}" if is_named else f"policy {config.policy}"
    _logger.info("start: budget %s on %s, %s, tier %s", format_bytes(budget_bytes), device, how, config.tier)


def log_first_step(room: Room, steps: StepTracker, budget_bytes: int, num_elsewhere: int) -> None:
    """Log what the first step took, and whether any buffer was evicted.

    Args:
        room: Of the session.
        steps: Of the session.
        budget_bytes: The budget.
        num_elsewhere: How many tensors were saved on another device of the same kind.
    """
    counters = room.counters
    if num_elsewhere and not counters.num_saved:
        device = room.ledger.device
        _logger.warning(
            "the step ran on another device than %s, whose memory the budget limits: make the device of the training "
            "current (torch.%s.set_device) before the budget begins",
            *(device, device.type),
        )
    peak = format_bytes(steps.peak_bytes)
    if counters.num_evictions == 0 and steps.peak_bytes <= budget_bytes:
        _logger.info("first step: it fits, nothing was evicted, recording is the only cost; peak %s", peak)
    else:
        _logger.info(
            "first step: peak %s, %s swapped out, %s dropped to be recomputed",
            peak,
            format_bytes(counters.swapped_out_bytes),
            format_bytes(counters.dropped_bytes),
        )
    late_bytes = room.ledger.late_bytes
    _logger.debug(
        "first step: %d ops, %d saved tensors; %s of parameters were not known before an op read them",
        counters.num_ops,
        counters.num_saved,
        format_bytes(late_bytes),
    )


def log_result(summary: Summary) -> None:
    """Log a summary's first line when a scope ends; as a warning if the peak exceeded the budget."""
    if not summary.num_steps and not summary.num_refused_steps:
        _logger.info("result: no training step was seen on this thread")
        return
    slowdown = summary.slowdown_at_least
    cost = f"; at least x{slowdown:.2f} of the plain time" if summary.evicted and slowdown is not None else ""
    _logger.log(logging.WARNING if summary.over_bytes else logging.INFO, "result: %s%s", summary.headline(), cost)
