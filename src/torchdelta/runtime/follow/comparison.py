"""Compares steps that follow a program with steps that react, and lets programs go, if the planner is "auto"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.runtime.follow.automatic import Verdict

if TYPE_CHECKING:
    from torchdelta.runtime.follow.automatic import Automatic
    from torchdelta.runtime.follow.follower import EndedStep
    from torchdelta.runtime.follow.program import Key, Program, ProgramCache
    from torchdelta.runtime.follow.wanted import WantedSteps
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["Comparison"]

_MOST_PAUSED_STEPS: Final = 64  # a kind whose program is paused may never come again


class Comparison:
    """Carries out what the times of steps say. See [Note: when a plan pays] in automatic.py.

    Args:
        automatic: Compares the times.
        cache: The programs that are followed.
        wanted: The steps that are traced.
    """

    def __init__(self, automatic: Automatic, cache: ProgramCache, wanted: WantedSteps) -> None:
        self._automatic = automatic
        self._cache = cache
        self._wanted = wanted

    def on_reacting_step(self, key: Key, steps: StepTracker) -> None:
        """Note the time of the latest step, which has reacted."""
        if self._automatic.on_reacting_step((key, steps.has_stepped), steps.last_time_s):
            self._cache.pause(key, is_paused=False)
        for paused in self._cache.age_paused(_MOST_PAUSED_STEPS):
            self._automatic.forget_followed(paused)

    def gives_up(self, program: Program, ended: EndedStep, steps: StepTracker) -> bool:
        """Note the time of the latest step, which has followed a program. Return whether the program was given up."""
        kind = ended.key, steps.has_stepped
        verdict = self._automatic.on_followed_step(kind, steps.last_time_s, may_react=ended.is_exact)
        if verdict is Verdict.REACT:
            self._cache.pause(ended.key, is_paused=True)
        elif verdict is Verdict.GIVE_UP:
            if ended.is_exact:
                self._cache.give_up(ended.key)
                self._wanted.note_unplannable(ended.key, 0)
            program.lends = False
        return verdict is Verdict.GIVE_UP
