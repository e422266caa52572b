"""By how many bytes the latest reading of an accelerator's allocator may be out of date.

[Note: reading seldom]
Reading the allocator's statistics costs more than an op. So it is read once in some requests, and in between the known
storages are counted by what they asked for. What the allocator rounds up meanwhile is missing from that count. For a
few requests, the most that it can be is reserved. For more of them that would be far too much (up to 1 MiB for each
large one), so the reserve is never larger than what the readings so far have shown, and half as much again.
The allocator is read earlier if the reserve takes more than a small share of the budget, and always before a budget is
refused.
What other threads allocate, or libraries that keep a workspace, shows in the next reading only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdelta.runtime.state.usage import Usage

__all__ = ["Reserve"]

_MOST_REQUESTS: Final = 64  # between two readings
_LARGEST_SHARE: Final = 1 / 400  # of the budget: a quarter of a percent
_FEWEST_COMPARED: Final = 8  # from fewer requests nothing is concluded
_MARGIN: Final = 1.5
_FADING: Final = 0.95  # of what was learned, for each further reading


class Reserve:
    """The requests since the latest reading, and how far a reading was off at most. Mutable."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._rounding_bytes = 0  # the most that these may take beyond what they asked for
        self._num_readings = -1
        self._unseen_bytes = 0  # in the latest reading
        self._num_compared = 0  # requests before the latest readings, from which nothing was concluded yet
        self._missed_bytes = 0  # by which these readings differed
        self._learned_bytes: float | None = None  # the reserve for `_MOST_REQUESTS` requests

    def add(self, usage: Usage, rounding_bytes: int, budget_bytes: int) -> None:
        """Read the allocator if that is due, set `usage.uncertain_bytes`, and count one more request.

        Args:
            usage: The bytes in use.
            rounding_bytes: The most that the request may take beyond what it asks for.
            budget_bytes: The budget.
        """
        if not usage.is_counting:  # a survey, whose storages take no memory
            usage.uncertain_bytes = 0
            return
        if usage.num_readings != self._num_readings:
            self._learn(usage)
        if self._num_requests >= _MOST_REQUESTS or usage.uncertain_bytes > budget_bytes * _LARGEST_SHARE:
            usage.ask_counter(fresh=True)
            self._learn(usage)
        learned_bytes = self._learned_bytes
        most_bytes = self._rounding_bytes if learned_bytes is None else min(self._rounding_bytes, int(learned_bytes))
        usage.uncertain_bytes = most_bytes
        self._num_requests += 1
        self._rounding_bytes += rounding_bytes

    def _learn(self, usage: Usage) -> None:
        """Note by how much the latest reading differed from the count."""
        if self._num_readings >= 0:
            self._num_compared += self._num_requests
            # What was rounded up in forward is freed in backward: a fall tells how much the next rise may be.
            self._missed_bytes += abs(usage.unseen_bytes - self._unseen_bytes)
        if self._num_compared >= _FEWEST_COMPARED:
            needed_bytes = _MARGIN * self._missed_bytes * max(1.0, _MOST_REQUESTS / self._num_compared)
            self._learned_bytes = max(needed_bytes, _FADING * (self._learned_bytes or 0.0))
            self._num_compared = self._missed_bytes = 0
        self._num_readings = usage.num_readings
        self._unseen_bytes = usage.unseen_bytes
        self._num_requests = self._rounding_bytes = 0
