"""The limit of a pause: garbage is collected in time, and not at every step where the bytes are in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchdelta.runtime.record.garbage_guard import GarbageGuard


class Room:
    """Some bytes in use and some garbage, in a budget of 1,000 bytes."""

    def __init__(self, used_bytes: int = 200, garbage_bytes: int = 0) -> None:
        self.used_bytes, self.garbage_bytes = used_bytes, garbage_bytes
        self.num_collections = 0

    @property
    def usage(self) -> SimpleNamespace:
        """Both together."""
        return SimpleNamespace(total_bytes=self.used_bytes + self.garbage_bytes, clear_limit=lambda: None)

    def begin_counting(self) -> int:
        """Return the budget."""
        return 1000

    def collect_garbage(self) -> int:
        """Free the garbage."""
        self.num_collections += 1
        freed_bytes, self.garbage_bytes = self.garbage_bytes, 0
        return freed_bytes


def guarded(room: Any) -> GarbageGuard:
    """Return the guard of a room."""
    return GarbageGuard(room)


def test_garbage_is_collected_at_half_of_the_free_bytes_again_and_again() -> None:
    """It has freed what was in the way, so the pause goes on."""
    room = Room()
    guard = guarded(room)
    assert guard.begin() == 600
    for _ in range(20):
        room.garbage_bytes = 500
        assert guard.next_limit_bytes() == 600


def test_bytes_in_use_are_looked_at_a_few_times_only() -> None:
    """Then the budget itself is the limit."""
    room = Room()
    guard = guarded(room)
    limits = []
    for _ in range(8):
        room.used_bytes = 200
        limits.append(guard.begin())
        room.used_bytes = 990
        if limits[-1] < room.used_bytes:
            assert guard.next_limit_bytes() == (995 if len(limits) < 4 else 1000)
    assert limits == [600, 800, 900, 950, 1000, 1000, 1000, 1000]
    assert room.num_collections == 4


def test_bytes_that_become_garbage_later_are_collected_at_the_next_limit() -> None:
    """The limit moves up by half of what is left; where garbage was found, the next pause begins with a lower one."""
    room = Room()
    guard = guarded(room)
    guard.begin()
    room.used_bytes = 700
    assert guard.next_limit_bytes() == 850
    room.used_bytes, room.garbage_bytes = 200, 700
    assert guard.next_limit_bytes() == 850
    room.used_bytes = 200
    assert guard.begin() == 600


def test_bytes_that_were_used_for_a_moment_end_no_pause() -> None:
    """Such as those of a temporary: they are gone before the limit's call comes."""
    room = Room()
    guard = guarded(room)
    limits = []
    for _ in range(6):
        limits.append(guard.begin())
        if limits[-1] < 1000:
            assert guard.next_limit_bytes() == 1000
    assert limits == [600, 800, 900, 950, 1000, 1000]
    assert room.num_collections == 4


def test_garbage_is_collected_before_an_optimizer_steps() -> None:
    """Once as much was taken as the first limit allows, also where limits were found to be in vain."""
    room = Room()
    guard = guarded(room)
    guard.before_optimizer()
    assert room.num_collections == 0
    guard.begin()
    guard.before_optimizer()
    assert room.num_collections == 0
    guard.begin()
    room.garbage_bytes = 500
    guard.before_optimizer()
    assert (room.num_collections, room.garbage_bytes) == (1, 0)
    room.garbage_bytes = 500
    guard.before_optimizer()  # once in a pause
    guard.begin()
    guard.end()
    guard.before_optimizer()
    assert room.num_collections == 1


def test_a_pause_ends_where_nothing_helps() -> None:
    """One op was refused; or the budget is passed, as accelerators may; or the limit is another one now."""
    room = Room()
    guard = guarded(room)
    assert guard.next_limit_bytes() == 0
    guard.begin()
    assert guard.next_limit_bytes() == 1000
    assert guard.next_limit_bytes() == 0
    room.used_bytes = 1200
    guard.begin()
    assert guard.next_limit_bytes() == 0
    guard.begin()
    guard.end()
    assert guard.next_limit_bytes() == 0
