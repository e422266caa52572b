"""Predicts when a persistent tensor is used next, from the order in which the last step used them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

__all__ = ["UseOrder", "UseSequence"]

# At most this many uses of a step are kept: a loop without training never ends its step.
_MOST_USES = 1_000_000
# A key whose uses are unknown counts as used this many steps from now: it is evicted before all others.
_UNKNOWN_STEPS = 2

_Key = TypeVar("_Key", bound="Hashable")


class UseSequence(Generic[_Key]):
    """The uses of an earlier step, and how far this step has come in them. Mutable.

    Attributes:
        keys: What is used, in order.
        positions: By key: where it is used, rising.
        now: How many of the uses are over.
    """

    def __init__(self, keys: Sequence[_Key] = ()) -> None:
        self.keys = keys
        self.positions: dict[_Key, list[int]] = {}
        for position, key in enumerate(keys):
            self.positions.setdefault(key, []).append(position)
        self.now = 0

    def find(self, key: _Key) -> int | None:
        """Return the position nearest to the current one at which a key is used; None if it is used nowhere."""
        positions = self.positions.get(key)
        if not positions:
            return None
        index = bisect_left(positions, self.now)
        around = positions[max(0, index - 1) : index + 1]
        return min(around, key=lambda position: abs(position - self.now))

    def use(self, key: _Key) -> bool:
        """Go on behind the use of a key, the nearest one. Return whether it has any."""
        position = self.find(key)
        if position is None:
            return False
        self.now = position + 1
        return True


class UseOrder:
    """The uses of the last step, and the position in them. Mutable; one for each session."""

    def __init__(self) -> None:
        self.count = 0  # of all uses so far
        self._last: UseSequence[int] = UseSequence()
        self._uses: list[int] = []  # the keys that this step has used so far
        self._last_use: dict[int, int] = {}  # in this step and the last, counted over all

    @property
    def length(self) -> int:
        """The number of uses in the last step."""
        return len(self._last.keys)

    def use(self, key: int) -> None:
        """Note that an op uses a tensor. Repeated uses in a row count once."""
        self.count += 1
        self._last_use[key] = self.count
        uses, last = self._uses, self._last
        if uses and uses[-1] == key:
            return
        if len(uses) < _MOST_USES:
            uses.append(key)
        if not last.use(key):
            last.now = min(last.now + 1, len(last.keys))

    def end_step(self) -> None:
        """Predict from the uses of the step that ends here, from now on."""
        if not self._uses:
            return
        self._last, self._uses = UseSequence(self._uses), []
        self._last_use = {key: at for key, at in self._last_use.items() if key in self._last.positions}

    def next_use(self, key: int) -> tuple[int, int]:
        """Return how far away the next use is; of tensors without a known use, the one used last is the nearest."""
        last = self._last
        positions = last.positions.get(key)
        if not positions:
            return (_UNKNOWN_STEPS * self.length, -self._last_use.get(key, 0))
        index = bisect_left(positions, last.now)
        if index < len(positions):
            return (positions[index] - last.now, 0)
        return (positions[0] + self.length - last.now, 0)

    def is_used_again(self, key: int) -> bool:
        """Return whether a tensor has a use in the rest of this step, if it is as the last one."""
        positions = self._last.positions.get(key)
        return bool(positions) and positions[-1] >= self._last.now

    def upcoming(self, num: int) -> Iterator[int]:
        """Yield the keys of the next uses, at most `num`; after the end of the step, those of the next step."""
        keys, now = self._last.keys, self._last.now
        for position in range(now, now + min(num, len(keys))):
            yield keys[position % len(keys)]
