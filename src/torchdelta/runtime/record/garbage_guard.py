"""Collects garbage in time while nothing is recorded and no op is given room.

[Note: garbage while recording pauses]
Tensors that only reference cycles keep alive may be all that is in the way of an allocation. A recorded op collects
them (`Room.make`). While recording pauses, an allocation beyond the budget is refused inside its kernel, which may hold
a lock of torch's, so no Python may run there. So garbage is collected earlier: between two ops, each time that half of
the free bytes were taken, and before the optimizer steps, if more than the first half of them is taken then. A
collection takes tens of milliseconds. Where the bytes are in use, or were for a moment only, it is in vain: then the
first limit of the next pause is higher, and after a few times it is the budget itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdelta.runtime.memory.room import Room

__all__ = ["GarbageGuard"]

_FIRST_SHARE: Final = 0.5  # of the free bytes; each time in vain, it is half as far from 1
_MOST_IN_VAIN: Final = 4


class GarbageGuard:
    """The limit of a pause, and what to do when it is passed."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_in_vain = 0
        self._limit_bytes = self._first_limit_bytes = 0  # 0: no pause

    def begin(self) -> int:
        """Begin a pause. Return its limit."""
        most_bytes = self._room.begin_counting()
        live_bytes = self._room.usage.total_bytes
        self._limit_bytes = most_bytes
        if self._num_in_vain < _MOST_IN_VAIN and live_bytes < most_bytes:
            share = 1.0 - (1.0 - _FIRST_SHARE) ** (1 + self._num_in_vain)
            self._limit_bytes = live_bytes + int(share * (most_bytes - live_bytes))
        self._first_limit_bytes = self._limit_bytes
        return self._limit_bytes

    def end(self) -> None:
        """End the pause: remove its limit."""
        self._limit_bytes = self._first_limit_bytes = 0
        self._room.usage.clear_limit()

    def next_limit_bytes(self) -> int:
        """Collect garbage: the limit was passed. Return the next limit, 0 if the pause has to end."""
        limit_bytes = self._limit_bytes
        if not limit_bytes:
            return 0
        freed_bytes = self._room.collect_garbage()
        most_bytes = self._room.begin_counting()
        live_bytes = self._room.usage.total_bytes
        if live_bytes > most_bytes or (limit_bytes >= most_bytes and not freed_bytes):
            return 0  # the budget was passed, or an op was refused
        if freed_bytes:
            self._num_in_vain = max(0, self._num_in_vain - 1)
        else:
            self._num_in_vain += 1
        if live_bytes > limit_bytes and self._num_in_vain < _MOST_IN_VAIN:
            self._limit_bytes = live_bytes + (most_bytes - live_bytes) // 2
        elif not freed_bytes:
            self._limit_bytes = most_bytes
        return self._limit_bytes

    def before_optimizer(self) -> None:
        """Collect garbage if more than the first limit is taken: a step that is refused half-way cannot be repeated.

        In a pause only, and once in it.
        """
        first_limit_bytes, self._first_limit_bytes = self._first_limit_bytes, 0
        if first_limit_bytes:
            self._room.begin_counting()
            if self._room.usage.total_bytes > first_limit_bytes and not self._room.collect_garbage():
                self._num_in_vain += 1
