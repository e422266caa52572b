"""Holds the figures of a model against what was promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.following.contenders import FOLLOWED, PEERS, REACTIVE, in_budget
from benchmarks.following.figures import Cell, Data, cell, ratio, recording

if TYPE_CHECKING:
    from benchmarks.outcome import Outcome

PEAK_TOLERANCE = 0.02
TIME_TOLERANCE = 0.10
LEAST_OVERHEAD = 0.02  # of plain, beyond recording: less cannot be halved with any certainty
UNPLANNED_SHARE = 0.01  # of the followed steps: the safety net acts in fewer
SWAPS_BYTES = 8 << 20  # a step that swaps less spends no time on it that could be seen


def judge(outcome: Outcome, model: str, data: Data) -> None:
    """Make all checks of one model."""
    for label in data["budgets"]:
        name = f"{model} {label}"
        refused = data["refused"].get(in_budget(FOLLOWED, label))
        if refused is not None:
            # A budget that nobody can train in is no failure of the plan, but one that a peer trains in is.
            least_bytes = refused["least_budget_bytes"]
            is_too_small = least_bytes is not None and in_budget(REACTIVE, label) in data["refused"]
            detail = f"least budget {least_bytes}" if is_too_small else refused["message"]
            outcome.check(f"{name}: followed", detail, passed=False, required=not is_too_small or label in PEERS)
            continue
        found = cell(data, label)
        if found.followed is not None:
            _judge_cell(outcome, name, data, found)


def _judge_cell(outcome: Outcome, name: str, data: Data, found: Cell) -> None:
    assert found.peak_share is not None
    outcome.check(
        f"{name}: peak of followed steps", f"{found.peak_share:.4f} of the budget", passed=found.peak_share <= 1
    )
    if found.label in PEERS:
        against = ratio(data, in_budget(FOLLOWED, found.label), found.label)
        if against is not None:
            outcome.check(
                f"{name}: followed against {found.label} at its peak", str(against), passed=against.median <= 1
            )
    if not found.has_plan:
        left_bytes = found.swapped_out_bytes + found.recomputed_bytes
        detail = f"none, but {left_bytes / 2**20:.1f} MiB leave in a step" if left_bytes else "nothing has to leave"
        outcome.check(f"{name}: plan", detail, passed=not left_bytes)
        return
    outcome.check(
        f"{name}: steps follow the plan",
        f"{found.num_followed} to their end, {found.num_diverged} diverged",
        passed=found.num_followed > 0 and not found.num_diverged,
    )
    outcome.check(
        f"{name}: room made beyond the plan",
        f"{found.num_unplanned} times in {found.num_followed} followed steps",
        passed=found.num_unplanned <= UNPLANNED_SHARE * found.num_followed,
    )
    if found.followed_of_reactive is not None:
        against = found.followed_of_reactive
        outcome.check(f"{name}: followed against reactive", str(against), passed=against.median <= 1)
    _judge_overhead(outcome, name, data, found)
    if found.predicted_peak is not None and found.predicted_time is not None:
        peak_share, time_share = found.predicted_peak, found.predicted_time
        passed = abs(peak_share - 1) <= PEAK_TOLERANCE
        outcome.check(f"{name}: predicted peak", f"{peak_share:.4f} of the measured one", passed=passed)
        passed = abs(time_share.median - 1) <= TIME_TOLERANCE
        outcome.check(f"{name}: predicted time", f"{time_share} of the measured one", passed=passed)
    if found.predicted_slowdown is not None:
        slowdown_share = found.predicted_slowdown
        passed = abs(slowdown_share.median - 1) <= TIME_TOLERANCE
        outcome.check(f"{name}: predicted slowdown", f"{slowdown_share} of the measured one", passed=passed)
    if found.no_prefetch_of_followed is not None:
        without = found.no_prefetch_of_followed
        swaps = found.swapped_out_bytes >= SWAPS_BYTES
        detail = str(without) if swaps else f"{without}; {found.swapped_out_bytes / 2**20:.1f} MiB are swapped"
        outcome.check(f"{name}: without prefetch is slower", detail, passed=without.median > 1, required=swaps)


def _judge_overhead(outcome: Outcome, name: str, data: Data, found: Cell) -> None:
    """Beyond what recording takes, a plan is to cost at most half of what the policy costs, where any plan can."""
    recorded = recording(data)
    if recorded is None or found.reactive is None or found.followed is None:
        return
    ours, reactive = found.followed.median - recorded.median, found.reactive.median - recorded.median
    least = None if found.bound is None else found.bound - 1
    detail = f"{ours:.3f} against {reactive:.3f} of plain; recording alone {recorded.median - 1:.3f}"
    # What was measured below the bound shows that the model's prices are too high: it then excuses nothing.
    is_possible = least is None or least <= 0.5 * reactive or ours < least
    outcome.check(
        f"{name}: at most half of reactive's overhead beyond recording",
        detail if least is None else f"{detail}; a plan of the class saved costs {least:.3f} or more",
        passed=ours <= 0.5 * reactive,
        required=reactive >= LEAST_OVERHEAD and is_possible,
    )
