"""Predicts when a persistent tensor is used next, from the order in which the last step used them."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["UseOrder"]

# A key whose uses are unknown counts as used this many steps from now: it is evicted before all others.
_UNKNOWN_STEPS = 2


class UseOrder:
    """The uses of the last step, and the position in them. Mutable; one for each session."""

    def __init__(self) -> None:
        self._positions: dict[int, list[int]] = {}  # of the last step, by key
        self._length = 0
        self._now = 0
        self._uses: list[int] = []  # the keys that this step has used so far
        self._last_use: dict[int, int] = {}  # in this step and the last, counted over all
        self._count = 0

    def use(self, key: int) -> None:
        """Note that an op uses a tensor. Repeated uses in a row count once."""
        self._count += 1
        self._last_use[key] = self._count
        uses = self._uses
        if uses and uses[-1] == key:
            return
        uses.append(key)
        positions = self._positions.get(key)
        self._now = self._now + 1 if not positions else _nearest(positions, self._now) + 1

    def end_step(self) -> None:
        """Predict from the uses of the step that ends here, from now on."""
        if not self._uses:
            return
        self._positions = {}
        for position, key in enumerate(self._uses):
            self._positions.setdefault(key, []).append(position)
        self._length = len(self._uses)
        self._uses = []
        self._now = 0
        self._last_use = {key: at for key, at in self._last_use.items() if key in self._positions}

    def next_use(self, key: int) -> tuple[int, int]:
        """Return how far away the next use is; of tensors without a known use, the one used last is the nearest."""
        positions = self._positions.get(key)
        if not positions:
            return (_UNKNOWN_STEPS * self._length, -self._last_use.get(key, 0))
        index = bisect_left(positions, self._now)
        if index < len(positions):
            return (positions[index] - self._now, 0)
        return (positions[0] + self._length - self._now, 0)


def _nearest(positions: list[int], position: int) -> int:
    index = bisect_left(positions, position)
    around = positions[max(0, index - 1) : index + 1]
    return min(around, key=lambda other: abs(other - position))
