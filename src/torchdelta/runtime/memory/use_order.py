"""Predicts when a persistent tensor is used next, from the order in which the last step used them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["UseOrder"]

# At most this many uses of a step are kept: a loop without training never ends its step.
_MOST_USES = 1_000_000
# A key whose uses are unknown counts as used this many steps from now: it is evicted before all others.
_UNKNOWN_STEPS = 2


class UseOrder:
    """The uses of the last step, and the position in them. Mutable; one for each session."""

    def __init__(self) -> None:
        self.count = 0  # of all uses so far
        self.length = 0  # the uses of the last step
        self._sequence: list[int] = []  # the keys that the last step has used
        self._positions: dict[int, list[int]] = {}  # their positions there
        self._now = 0
        self._uses: list[int] = []  # the keys that this step has used so far
        self._last_use: dict[int, int] = {}  # in this step and the last, counted over all

    def use(self, key: int) -> None:
        """Note that an op uses a tensor. Repeated uses in a row count once."""
        self.count += 1
        self._last_use[key] = self.count
        uses = self._uses
        if uses and uses[-1] == key:
            return
        if len(uses) < _MOST_USES:
            uses.append(key)
        positions = self._positions.get(key)
        self._now = min(self._now + 1, self.length) if not positions else _nearest(positions, self._now) + 1

    def end_step(self) -> None:
        """Predict from the uses of the step that ends here, from now on."""
        if not self._uses:
            return
        self._positions = {}
        for position, key in enumerate(self._uses):
            self._positions.setdefault(key, []).append(position)
        self._sequence, self._uses = self._uses, []
        self.length = len(self._sequence)
        self._now = 0
        self._last_use = {key: at for key, at in self._last_use.items() if key in self._positions}

    def next_use(self, key: int) -> tuple[int, int]:
        """Return how far away the next use is; of tensors without a known use, the one used last is the nearest."""
        positions = self._positions.get(key)
        if not positions:
            return (_UNKNOWN_STEPS * self.length, -self._last_use.get(key, 0))
        index = bisect_left(positions, self._now)
        if index < len(positions):
            return (positions[index] - self._now, 0)
        return (positions[0] + self.length - self._now, 0)

    def is_used_again(self, key: int) -> bool:
        """Return whether a tensor has a use in the rest of this step, if it is as the last one."""
        positions = self._positions.get(key)
        return bool(positions) and positions[-1] >= self._now

    def upcoming(self, num: int) -> Iterator[int]:
        """Yield the keys of the next uses, at most `num`; after the end of the step, those of the next step."""
        sequence, length = self._sequence, self.length
        for position in range(self._now, self._now + min(num, length)):
            yield sequence[position % length]


def _nearest(positions: list[int], position: int) -> int:
    index = bisect_left(positions, position)
    around = positions[max(0, index - 1) : index + 1]
    return min(around, key=lambda other: abs(other - position))
