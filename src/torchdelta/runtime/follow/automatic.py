"""Decides when a session with the default planner, "auto", begins to plan, and whether a plan is given up.

[Note: when a plan pays]
A plan is made by a helper process, which takes seconds of a core and some hundred megabytes. Nobody knows how long a
training will go on. So planning begins once the budget has cost as much time (waiting for copies, replays, choosing
what leaves) as a plan costs. Whenever the training ends, it has then lost at most twice the time that the best choice
in hindsight would have lost (the ski-rental rule). A training whose steps fit, or a short script, never starts a
helper.

Before that, some reactive steps are timed. A program whose steps take longer is given up: steps of its kind stay
reactive from then on, and steps of other shapes no longer borrow it. So the default is never slower than reacting,
except in the steps that reveal a slow program.

Once a program is followed, the same helper plans the step twice more, in larger budgets, for the summary
(other_budgets.py). This is the only planning that no training step waits for or gains from, and it happens once.
"""

from __future__ import annotations

import collections
import logging
import statistics
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from torchdelta.host import num_processes_here, read_host_memory
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.runtime.follow.program import Key
    from torchdelta.runtime.memory.room import Room

__all__ = ["PLANNER", "Automatic", "may_plan"]

_logger = logging.getLogger("torchdelta")

PLANNER: Final = "torchdelta"  # what "auto" stands for
PLAN_COST_S: Final = 10.0  # of a core: starting the helper, loading compiled code, planning a step of a thousand ops
TIMED_SHARE: Final = 0.5  # of that time: from here on steps are timed
HELPER_BYTES: Final = 1 << 30  # at most, with the step's trace
FEWEST_TIMED: Final = 5
_NUM_TIMES: Final = 7
_MOST_KEYS: Final = 64
_SLOWER: Final = 1.02


class Automatic:
    """The times of the steps that react, and what the budget has cost so far. Mutable.

    Args:
        room: Counts what leaving and returning cost; knows the budget and the bytes in use.
    """

    def __init__(self, room: Room) -> None:
        self.has_begun = False  # whether steps are planned
        self.why_not = ""  # why none will be
        self._room = room
        self._reacting_s: dict[Key, collections.deque[float]] = {}
        self._following_s: dict[Key, collections.deque[float]] = {}
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

    def on_reacting_step(self, key: Key, time_s: float) -> None:
        """Note the time of a step that was neither traced nor followed."""
        self._num_timed += 1
        _add(self._reacting_s, key, time_s)

    def is_slower(self, key: Key, time_s: float) -> bool:
        """Note the time of a followed step. Return whether the steps of its kind take longer than reacting did."""
        _add(self._following_s, key, time_s)
        following_s = self._following_s[key]
        reacting_s = self._reacting_s.get(key, ())
        if len(following_s) < _NUM_TIMES or len(reacting_s) < FEWEST_TIMED:
            return False
        median_s, reacting_median_s = statistics.median(following_s), statistics.median(reacting_s)
        following_s.clear()
        if median_s <= reacting_median_s * _SLOWER:
            return False
        _logger.log(
            logging.DEBUG if self._has_given_up else logging.INFO,  # once, not for each kind of step
            "plan: given up, because followed steps took %.1f ms and reactive steps %.1f ms",
            median_s * 1e3,
            reacting_median_s * 1e3,
        )
        self._has_given_up = True
        return True

    def forget_followed(self, key: Key) -> None:
        """Forget the times of followed steps of a kind: it follows another program now."""
        self._following_s.pop(key, None)

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


def _add(times_s: dict[Key, collections.deque[float]], key: Key, time_s: float) -> None:
    if key not in times_s and len(times_s) >= _MOST_KEYS:
        del times_s[next(iter(times_s))]
    times_s.setdefault(key, collections.deque(maxlen=_NUM_TIMES)).append(time_s)
