"""Decides when a session with the default planner, "auto", begins to plan, and whether a plan is given up.

[Note: when a plan pays]
A plan is made by a helper process, which takes seconds of a core and some hundred megabytes. Nobody knows how long a
training will go on. So planning begins once the budget has cost as much time (waiting for copies, replays, choosing
what leaves) as a plan costs. Whenever the training ends, it has then lost at most twice the time that the best choice
in hindsight would have lost (the ski-rental rule). A training whose steps fit, or a short script, never starts a
helper.

Before that, some reactive steps are timed. No step is timed while the helper plans, which takes a core. If the steps
that follow a program take longer, either the program is slow, or the machine has become slower since. So the next steps
of its kind react again, and are timed anew, and then the program is followed once more. It is given up if its steps
took longer both times: steps of its kind stay reactive from then on, and steps of other shapes no longer borrow it. If
a kind borrows a program, and two medians in a row of its steps are longer than that of its reacting steps, no other
kind borrows that program any more. Steps with an optimizer are not compared with steps without one, because
micro-batches of an accumulation may save the same tensors.

Once a program is followed, the same helper plans the step twice more, in larger budgets, for the summary
(other_budgets.py). This is the only planning that no training step waits for or gains from, and it happens once.
"""

from __future__ import annotations

import collections
import enum
import logging
import statistics
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeAlias

from torchdelta.host import num_processes_here, read_host_memory
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.runtime.follow.program import Key
    from torchdelta.runtime.memory.room import Room

__all__ = ["PLANNER", "Automatic", "Kind", "Verdict", "may_plan"]

Kind: TypeAlias = "tuple[Key, bool]"
"""Which steps are compared: what they saved, and whether an optimizer stepped at their end."""

_logger = logging.getLogger("torchdelta")

PLANNER: Final = "torchdelta"  # what "auto" stands for
PLAN_COST_S: Final = 10.0  # of a core: starting the helper, loading compiled code, planning a step of a thousand ops
TIMED_SHARE: Final = 0.5  # of that time: from here on steps are timed
HELPER_BYTES: Final = 1 << 30  # at most, with the step's trace
FEWEST_TIMED: Final = 5
_NUM_TIMES: Final = 7
_MOST_KINDS: Final = 64
_SLOWER: Final = 1.02


class Verdict(enum.Enum):
    """What the times of followed steps say."""

    GO_ON = enum.auto()
    REACT = enum.auto()  # for some steps, which are timed
    GIVE_UP = enum.auto()


@dataclass(eq=False, slots=True)
class _Times:
    """Of one kind of steps: the latest times, and what is known of its program. Mutable.

    Attributes:
        reacting_s: Of steps that react.
        following_s: Of followed steps, since their median was taken last.
        doubted_s: The median of followed steps that led to reacting again; 0.0 while that is not going on.
        num_anew: Steps that have reacted since then.
        was_slower: Whether the latest median of followed steps was longer than that of reacting ones.
    """

    reacting_s: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_NUM_TIMES))
    following_s: list[float] = field(default_factory=list)
    doubted_s: float = 0.0
    num_anew: int = 0
    was_slower: bool = False

    def is_slower(self, following_s: float) -> bool:
        """Return whether a median of followed steps is longer than that of reacting steps."""
        return following_s > statistics.median(self.reacting_s) * _SLOWER


class Automatic:
    """The times of the steps that react, and what the budget has cost so far. Mutable.

    Args:
        room: Counts what leaving and returning cost; knows the budget and the bytes in use.
    """

    def __init__(self, room: Room) -> None:
        self.has_begun = False  # whether steps are planned
        self.why_not = ""  # why none will be
        self._room = room
        self._times: dict[Kind, _Times] = {}
        self._num_timed = 0
        self._has_given_up = False

    @property
    def lost_s(self) -> float:
        """The seconds that the budget has cost so far, as far as they are known."""
        return self._room.counters.lost_s

    @property
    def is_timing(self) -> bool:
        """Whether steps are numbered and timed."""
        return self.lost_s >= PLAN_COST_S * TIMED_SHARE

    def begin_if_it_pays(self) -> bool:
        """Return whether steps are to be planned from now on; if something is missing for it, `why_not` has that."""
        if self.has_begun or self.lost_s < PLAN_COST_S or self._num_timed < FEWEST_TIMED:
            return self.has_begun
        self.why_not = self._missing()
        self.has_begun = not self.why_not
        if self.why_not:
            _logger.info("plan: none, because %s; buffers are evicted reactively", self.why_not)
        return self.has_begun

    def on_reacting_step(self, kind: Kind, time_s: float) -> bool:
        """Note the time of a step that was neither traced nor followed. Return whether its program is to be followed.

        If not, its program is doubted, and more steps are to react.
        """
        self._num_timed += 1
        times = self._of(kind)
        times.reacting_s.append(time_s)
        if times.doubted_s:
            times.num_anew += 1
            if times.num_anew >= _NUM_TIMES:
                times.was_slower = times.is_slower(times.doubted_s)
                times.doubted_s = 0.0
        # Steps that save the same tensors, and differ in the optimizer, have the same program.
        return not any(key == kind[0] and other.doubted_s for (key, _), other in self._times.items())

    def on_followed_step(self, kind: Kind, time_s: float, *, may_react: bool) -> Verdict:
        """Note the time of a followed step, and compare the median of several with that of reacting steps.

        Args:
            kind: Of the step.
            time_s: What it took.
            may_react: Whether the step can be made to react: it has a program of its own.
        """
        times = self._of(kind)
        times.following_s.append(time_s)
        if len(times.following_s) < _NUM_TIMES or len(times.reacting_s) < FEWEST_TIMED:
            del times.following_s[:-_NUM_TIMES]
            return Verdict.GO_ON
        median_s, was_slower = statistics.median(times.following_s), times.was_slower
        times.following_s.clear()
        times.was_slower = times.is_slower(median_s)
        if not times.was_slower:
            return Verdict.GO_ON
        if was_slower:
            self._log_given_up(median_s, statistics.median(times.reacting_s))
            return Verdict.GIVE_UP
        if not may_react:
            return Verdict.GO_ON
        times.doubted_s, times.num_anew, times.was_slower = median_s, 0, False
        return Verdict.REACT

    def forget_followed(self, key: Key) -> None:
        """Forget the times of followed steps of a kind: it follows another program now."""
        for (other, _), times in self._times.items():
            if other == key:
                times.following_s.clear()
                times.was_slower = False
                times.doubted_s = 0.0

    def _of(self, kind: Kind) -> _Times:
        if kind not in self._times and len(self._times) >= _MOST_KINDS:
            del self._times[next(iter(self._times))]
        return self._times.setdefault(kind, _Times())

    def _log_given_up(self, following_s: float, reacting_s: float) -> None:
        _logger.log(
            logging.DEBUG if self._has_given_up else logging.INFO,  # once, not for each kind of step
            "plan: given up, because followed steps took %.1f ms and reactive steps %.1f ms",
            following_s * 1e3,
            reacting_s * 1e3,
        )
        self._has_given_up = True

    def _missing(self) -> str:
        """Return what planning lacks here; empty if nothing."""
        if find_spec("numba") is None:
            return "numba is not installed (pip install 'torchdelta[plan]')"
        free_bytes = read_host_memory().free_bytes
        budget_bytes = self._room.budget_bytes or 0
        needed_bytes = HELPER_BYTES + max(0, budget_bytes - self._room.usage.total_bytes)
        if free_bytes < needed_bytes:
            return (
                f"{format_bytes(free_bytes)} of host memory are free, but the rest of the budget and a helper process "
                f"may need {format_bytes(needed_bytes)}"
            )
        return ""


def may_plan(config: Config, device_type: str) -> bool:
    """Return whether "auto" may plan: on a CPU, in the only training process of the machine."""
    return (
        config.planner == "auto"
        and config.decisions is None
        and not config.arena
        and device_type == "cpu"
        and num_processes_here() == 1
    )
