"""What following did, for the summary: measured beside predicted, and why steps were not followed."""

from __future__ import annotations

import collections
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from torchdelta.summary import FollowSummary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.follow.programs import Programs
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["FollowReport"]

_MAX_STEPS: Final = 1000  # medians are those of the latest steps
_MAX_REASONS: Final = 4
_MOST_PLANS: Final = 64
_MOST_COUNTED_PLANS: Final = 1024


class _Step(NamedTuple):
    """A followed step beside its prediction."""

    predicted_time_s: float
    plain_time_s: float
    outside_s: float
    predicted_peak_bytes: int
    time_s: float
    peak_bytes: int


class FollowReport:
    """Counts and measures the steps of one session. Mutable.

    Args:
        programs: What was planned.
        follower: What was carried out.
    """

    def __init__(self, programs: Programs, follower: Follower) -> None:
        self.programs = programs
        self.follower = follower
        self._num_steps_by_plan: collections.Counter[int] = collections.Counter()
        self._steps: collections.deque[_Step] = collections.deque(maxlen=_MAX_STEPS)  # the latest followed ones

    def on_step_end(self, steps: StepTracker) -> None:
        """Note which program the step that has ended has followed; measure the step if that program is its own."""
        ended = self.follower.ended
        if ended is None or ended.program is None:
            return
        number = ended.program.number
        steps.note_plan(number)
        self._num_steps_by_plan[number] += 1
        if len(self._num_steps_by_plan) > _MOST_COUNTED_PLANS:
            self._num_steps_by_plan = collections.Counter(dict(self._num_steps_by_plan.most_common(_MOST_PLANS)))
        if ended.is_exact:
            self._steps.append(_beside_prediction(ended.program, steps))

    def summary(self, num_steps: int) -> FollowSummary | None:
        """Return the summary so far; None where no plan was asked for and none given.

        Args:
            num_steps: Steps of the session, of all kinds.
        """
        programs, follower = self.programs, self.follower
        if not programs.name:
            return None
        plain_time_s = _median(step.plain_time_s for step in self._steps)
        predicted_time_s = _median(step.predicted_time_s for step in self._steps)
        predicted_peak_bytes = _median(step.predicted_peak_bytes for step in self._steps)
        time_s = _median(step.time_s for step in self._steps)
        peak_bytes = _median(step.peak_bytes for step in self._steps)
        num_away = follower.num_followed_steps + follower.num_diverged_steps
        latest = programs.latest
        return FollowSummary(
            planner=programs.name,
            num_programs=programs.num_programs,
            num_followed_steps=follower.num_followed_steps,
            num_diverged_steps=follower.num_diverged_steps,
            num_reactive_steps=max(0, num_steps - num_away),
            num_not_carried_out=latest.schedule.num_not_carried_out if latest is not None else 0,
            num_unplanned=follower.room.counters.num_unplanned,
            divergences=dict(follower.reasons.most_common(_MAX_REASONS)),
            latest_divergence=follower.latest_reason,
            why_no_plan=programs.why_no_plan,
            predicted_time_s=predicted_time_s or None,
            time_s=time_s,
            predicted_peak_bytes=None if predicted_peak_bytes is None else int(predicted_peak_bytes),
            peak_bytes=None if peak_bytes is None else int(peak_bytes),
            plain_time_s=plain_time_s or None,
            outside_s=_median(step.outside_s for step in self._steps) if predicted_time_s else None,
            overheads_by_budget=dict(sorted(programs.other_budgets.overheads.items())),
            num_steps_by_plan=dict(self._num_steps_by_plan.most_common(_MOST_PLANS)),
            slowdown=time_s / plain_time_s if time_s is not None and plain_time_s else None,
        )


def _beside_prediction(program: Program, steps: StepTracker) -> _Step:
    return _Step(
        predicted_time_s=program.predicted_time_s,
        plain_time_s=program.answer.plain_time_s,
        outside_s=program.outside_s,
        predicted_peak_bytes=program.predicted_peak_bytes,
        time_s=steps.last_time_s,
        peak_bytes=steps.last_peak_bytes,
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
