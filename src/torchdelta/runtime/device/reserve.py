"""By how many bytes the latest reading of an accelerator's allocator may be out of date.

[Note: reading seldom]
Reading the allocator's statistics costs more than an op. So it is read once in some requests. In between, the known
storages are counted by what they asked for; what the allocator rounds up is missing from that count. A reserve takes
its place: the most that the requests since the reading may have been rounded up. For many large requests, each of which
may take 1 MiB more, that would be far too much. Therefore it is limited to 1.5 times what readings have shown to be
missing after so many requests.

If more was missing than rounding explains (an op with many outputs, a library that keeps a workspace, another thread,
memory that a stream still uses), the difference is reserved as well, for a while. The first time, it shows in the next
reading only. Where allocations are watched (native/device_watch.py), all of this is counted: only rounding is missing.

The allocator is read earlier if the reserve takes more than a small share of the budget, and always before a budget is
refused. Intervals between readings differ in length, so that what rises and falls within a long one shows in a short
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdelta.runtime.state.usage import Usage

__all__ = ["LARGEST_SHARE", "Reserve"]

_INTERVALS: Final = (64, 8, 64, 24)  # requests between two readings, in turns
_MOST_REQUESTS: Final = 64
LARGEST_SHARE: Final = 1 / 400  # of the budget: a quarter of a percent
_FEWEST_COMPARED: Final = 8  # from fewer requests nothing is concluded
_MARGIN: Final = 1.5
_FADING: Final = 0.95  # of what was learned, each time that more is learned


class Reserve:
    """The requests since the latest reading, and how far readings were off. Mutable."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._rounding_bytes = 0  # the most that these may take beyond what they asked for
        self._num_readings = -1
        self._unseen_bytes = 0  # in the latest reading
        self._interval = 0
        self._num_compared = 0  # requests before the latest readings, from which nothing was concluded yet
        self._missed_bytes = 0  # by which these readings differed
        self._learned_bytes: float | None = None  # the reserve for `_MOST_REQUESTS` requests
        self._excess_bytes = 0.0  # missed beyond all rounding

    def add(self, usage: Usage, rounding_bytes: int, budget_bytes: int) -> None:
        """Read the allocator if that is due, and set `usage.uncertain_bytes` for one more request, which it includes.

        Args:
            usage: The bytes in use.
            rounding_bytes: The most that the request may take beyond what it asks for.
            budget_bytes: The budget.
        """
        if not usage.is_counting:  # a survey, whose storages take no memory
            usage.rounding_bytes = usage.uncertain_bytes = rounding_bytes
            return
        if usage.num_readings != self._num_readings:
            self._learn(usage)
        if (
            self._num_requests >= _INTERVALS[self._interval]
            or usage.uncertain_bytes - usage.rounding_bytes > budget_bytes * LARGEST_SHARE
        ):
            usage.rounding_bytes = 0  # the latest request was served: the reading includes it
            usage.ask_counter(fresh=True)
            self._learn(usage)
            self._interval = (self._interval + 1) % len(_INTERVALS)
        earlier_bytes = self._rounding_bytes
        if self._learned_bytes is not None:
            earlier_bytes = min(earlier_bytes, int(self._learned_bytes))
        usage.rounding_bytes = rounding_bytes
        usage.uncertain_bytes = earlier_bytes + rounding_bytes + int(self._excess_bytes)
        self._num_requests += 1
        self._rounding_bytes += rounding_bytes

    def _learn(self, usage: Usage) -> None:
        """Note by how much the latest reading differed from the count."""
        if self._num_readings >= 0:
            # What was rounded up in forward is freed in backward: a fall tells how much the next rise may be.
            watched_bytes = usage.take_missed_bytes()
            missed_bytes = abs(usage.unseen_bytes - self._unseen_bytes if watched_bytes is None else watched_bytes)
            excess_bytes = _MARGIN * max(0, missed_bytes - self._rounding_bytes) if watched_bytes is None else 0.0
            self._excess_bytes = max(excess_bytes, _FADING * self._excess_bytes)
            self._num_compared += self._num_requests
            self._missed_bytes += missed_bytes
        if self._num_compared >= _FEWEST_COMPARED:
            needed_bytes = _MARGIN * self._missed_bytes * max(1.0, _MOST_REQUESTS / self._num_compared)
            self._learned_bytes = max(needed_bytes, _FADING * (self._learned_bytes or 0.0))
            self._num_compared = self._missed_bytes = 0
        self._num_readings = usage.num_readings
        self._unseen_bytes = usage.unseen_bytes
        # The latest request may have been served after the reading.
        self._num_requests = 1 if usage.rounding_bytes else 0
        self._rounding_bytes = usage.rounding_bytes
