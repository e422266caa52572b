"""Moves persistent tensors beside the compute as a plan says, in place of `ReadAhead`.

A plan says where in the step each tensor leaves and where its way back begins. `follow/persistent_cursor.py` knows how
far the step has come, and asks for what is due. What the plan misses is done as without one: a tensor that is not here
is brought back at its use, and if memory is short, the room evicts what is needed last.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.memory.candidates import Candidates
    from torchdelta.runtime.memory.emptying import Emptying
    from torchdelta.runtime.memory.in_use import InUse
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.persistent import Persistent
    from torchdelta.runtime.state.usage import Usage

__all__ = ["Move", "PlannedMoves"]


_FEWEST_BEFORE_SEARCH: Final = 8
_CALLS_UNTIL_RETRY: Final = 16  # of what may not leave: something else holds it, perhaps for long


class Move(enum.IntEnum):
    """What a plan does with a tensor. At one op, moves that free memory come first."""

    LEAVE = 0  # its memory is freed, once its copy out has ended
    COPY_IN = 1  # its memory is taken, and its copy in begins
    COPY_OUT = 2  # its copy out begins


class PlannedMoves:
    """Carries out moves that are due. Mutable.

    Args:
        candidates: What may leave.
        emptying: Moves it.
        in_use: What must stay.

    Attributes:
        is_on: Whether a plan is followed.
        on_moment: Called before an op, after its uses were reported.
        lacks: Returns how many bytes have to leave for a number of bytes to fit.
    """

    def __init__(self, candidates: Candidates, emptying: Emptying, in_use: InUse) -> None:
        self.is_on = False
        self.on_moment: Callable[[], None] | None = None
        self.lacks: Callable[[int], int] = _lacks_all
        self._candidates = candidates
        self._emptying = emptying
        self._in_use = in_use
        self._due: dict[int, Move] = {}  # by key: only its last move counts
        # Keys of those that should have left, but cannot or are not known; and at which call of `move` to try again.
        self._late: dict[int, int] = {}
        self._num_calls = 0
        self._copies: dict[int, int] = {}  # the same for copies out that have not begun
        self._leaving: dict[int, None] = {}  # keys of those that leave once their copies out have ended
        self._fetches: list[int] = []  # keys of those that should come back, and for which there was no room so far
        self._num_before_search = 0  # how often unknown keys are passed over before they are looked for again

    @property
    def has_due(self) -> bool:
        """Whether anything has to be moved."""
        return bool(self._due or self._late or self._copies or self._leaving or self._fetches)

    def ask(self, moves: Iterable[tuple[Move, int]]) -> None:
        """Ask for moves of tensors, which are named by their keys, in this order."""
        for move, key in moves:
            earlier = self._due.pop(key, None)
            # At one op, LEAVE sorts before COPY_OUT. LEAVE copies out if that is needed, so COPY_OUT is dropped; so is
            # that of a tensor which is not back yet.
            self._due[key] = move if earlier is None or move is not Move.COPY_OUT else earlier

    def move(self) -> None:
        """Carry out what is due. A departure of a tensor in use and a copy in without room are tried again later."""
        due, self._due = self._due, {}
        self._num_calls += 1
        late = [key for key, at in self._late.items() if at <= self._num_calls or key in due]
        for key in late:
            del self._late[key]
        copied = [key for key in self._leaving if key in due or not self._is_copying(key)]
        for key in copied:
            del self._leaving[key]
        known = [key for key in copied if self._find(key) is not None]  # the program has freed the others
        leaving = [key for key in (*known, *late) if key not in due]
        leaving += [key for key, move in due.items() if move is Move.LEAVE]
        if leaving:
            self._fetches = [key for key in self._fetches if due.get(key) is not Move.LEAVE]
            self._leave(leaving)
        self._fetches += [key for key, move in due.items() if move is Move.COPY_IN]
        for index, key in enumerate(self._fetches):
            if not self._fetch(key):
                del self._fetches[:index]
                break
        else:
            self._fetches.clear()
        for key, move in due.items():
            if move is Move.COPY_OUT:
                self._copies[key] = self._num_calls
            else:
                self._copies.pop(key, None)
        self._begin_copies()

    def finish_leaving(self, target_bytes: int, usage: Usage) -> None:
        """Wait for copies out, and let their tensors leave, until no more than `target_bytes` live."""
        for key in list(self._leaving):
            if usage.live_bytes <= target_bytes:
                return
            del self._leaving[key]
            known = self._find(key)
            if known is not None and self._emptying.has_spare(known.record):
                self._emptying.finish_spare(known.record)
                self._leave([key])

    def end_step(self) -> None:
        """Try no departure and no copy out of this step again."""
        self._late.clear()
        self._copies.clear()

    def knows(self, keys: Iterable[int]) -> bool:
        """Return whether there is a tensor for each key."""
        if all(self._find(key) is not None for key in keys):
            return True
        self._candidates.search()
        return all(self._find(key) is not None for key in keys)

    def forget(self) -> None:
        """Forget what is due."""
        self._due.clear()
        self._late.clear()
        self._copies.clear()
        self._leaving.clear()
        self._fetches.clear()

    def _is_copying(self, key: int) -> bool:
        known = self._find(key)
        return (
            known is not None and self._emptying.has_spare(known.record) and not self._emptying.is_clean(known.record)
        )

    def _find(self, key: int) -> Persistent | None:
        known = self._candidates.by_key.get(key)
        return known if known is not None and known.record.storage() is not None else None

    def _look_for(self, keys: Iterable[int]) -> None:
        """Search if a tensor is not known: gradients are new in each step. Not each time, because that takes long."""
        if any(self._find(key) is None for key in keys):
            self._num_before_search -= 1
            if self._num_before_search < 0:
                candidates = self._candidates
                candidates.search()
                self._num_before_search = max(_FEWEST_BEFORE_SEARCH, len(candidates.known) // _FEWEST_BEFORE_SEARCH)

    def _begin_copies(self) -> None:
        """Begin copies out. Those of tensors that are unknown, in use or cannot be copied now are tried again later."""
        keys = [key for key, at in self._copies.items() if at <= self._num_calls]
        if not keys:
            return
        self._look_for(keys)
        if all(self._find(key) is None for key in keys):
            return
        locked = self._in_use.addresses()
        for key in keys:
            known = self._find(key)
            if known is None or known.record.address in locked:  # the engine may be about to accumulate it
                self._copies[key] = self._num_calls + 1
            elif self._copy(key, locked):
                del self._copies[key]
            else:
                self._copies[key] = self._num_calls + _CALLS_UNTIL_RETRY

    def _leave(self, keys: list[int]) -> None:
        candidates, emptying, locked = self._candidates, self._emptying, self._in_use.addresses()
        records: list[StorageRecord] = []
        self._look_for(keys)
        for key in keys:
            known = self._find(key)
            if known is None or known.record.address in locked:
                self._late[key] = self._num_calls + 1
                continue
            if known.record.emptied is not None:
                emptying.cancel_refill(known.record)  # it came back for a use that the step has left out
                continue
            if not emptying.has_spare(known.record):
                self._copy(key, locked)
            if self._is_copying(key):
                self._leaving[key] = None  # nothing waits for it until its memory is needed
                continue
            emptying.finish_spare(known.record)  # it has ended, but the transfer holds the storage
            if candidates.may_leave(known):
                records.append(known.record)
            else:
                self._late[key] = self._num_calls + _CALLS_UNTIL_RETRY
        if records:
            candidates.note_leaving(records)
            emptying.empty(records)

    def _fetch(self, key: int) -> bool:
        """Start a copy in, if that is needed. Return whether there was room."""
        known = self._find(key)
        content = known.record.emptied if known is not None else None
        if known is None or content is None or content.transfer is not None or content.is_read:
            return True
        if self.lacks(content.size_bytes):
            return False
        self._emptying.start_refill(known.record)
        return True

    def _copy(self, key: int, locked: set[int]) -> bool:
        """Begin a copy out, if that is needed. Return whether there is nothing left to begin."""
        known = self._find(key)
        if known is None or known.record.emptied is not None or self._emptying.has_spare(known.record):
            return True
        if known.record.address in locked:
            return False  # the running op may write it
        # On several streams, a gradient that no recorded op has made may not be complete before backward ends.
        begins_content = known.is_gradient and self._candidates.is_on_cpu
        if (known.record.current is None and not begins_content) or not self._candidates.may_leave(known):
            return False
        return self._emptying.make_spare(known.record, begins_content=begins_content)


def _lacks_all(size_bytes: int) -> int:
    return size_bytes
