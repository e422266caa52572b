"""What following did, for the summary: measured beside predicted, and why steps were not followed."""

from __future__ import annotations

import collections
import statistics
from typing import TYPE_CHECKING, Final

from torchdelta.summary import FollowSummary

if TYPE_CHECKING:
    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.follow.programs import Programs
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["FollowReport"]

_MAX_STEPS: Final = 1000  # medians are those of the latest steps
_MAX_REASONS: Final = 4


class FollowReport:
    """Counts and measures the steps of one session. Mutable.

    Args:
        programs: What was planned.
        follower: What was carried out.
    """

    def __init__(self, programs: Programs, follower: Follower) -> None:
        self.programs = programs
        self.follower = follower
        self._times_s: collections.deque[float] = collections.deque(maxlen=_MAX_STEPS)
        self._peaks_bytes: collections.deque[int] = collections.deque(maxlen=_MAX_STEPS)

    def on_step_end(self, steps: StepTracker) -> None:
        """End the step for the follower and for the programs, and measure it if it was followed."""
        self.follower.on_step_end()
        if self.follower.was_followed:
            self._times_s.append(steps.last_time_s)
            self._peaks_bytes.append(steps.last_peak_bytes)
        self.programs.on_step_end(steps.last_peak_bytes)

    def summary(self, num_steps: int) -> FollowSummary | None:
        """Return the summary so far; None where no plan was asked for and none given.

        Args:
            num_steps: Steps of the session, of all kinds.
        """
        programs, follower = self.programs, self.follower
        if not programs.name:
            return None
        answer = programs.answer
        time_s = statistics.median(self._times_s) if self._times_s else None
        plain_time_s = answer.plain_time_s if answer is not None else 0.0
        num_away = follower.num_followed_steps + follower.num_diverged_steps
        return FollowSummary(
            planner=programs.name,
            num_programs=programs.num_programs,
            num_followed_steps=follower.num_followed_steps,
            num_diverged_steps=follower.num_diverged_steps,
            num_reactive_steps=max(0, num_steps - num_away),
            num_not_carried_out=follower.program.num_not_carried_out if follower.program is not None else 0,
            num_unplanned=follower.room.counters.num_unplanned,
            divergences=dict(follower.reasons.most_common(_MAX_REASONS)),
            latest_divergence=follower.latest_reason,
            why_no_plan=programs.why_no_plan,
            predicted_time_s=answer.time_s or None if answer is not None else None,
            time_s=time_s,
            predicted_peak_bytes=answer.peak_bytes if answer is not None else None,
            peak_bytes=int(statistics.median(self._peaks_bytes)) if self._peaks_bytes else None,
            plain_time_s=plain_time_s or None,
            slowdown=time_s / plain_time_s if time_s is not None and plain_time_s else None,
        )
