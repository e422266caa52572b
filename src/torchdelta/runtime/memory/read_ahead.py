"""Moves persistent tensors beside the compute: reads the next ones ahead, and copies out those that will leave.

[Note: what is read ahead]
The last step tells in which order tensors are used (use_order.py). Those among the next uses that have left are read
ahead, up to a window of bytes, as long as there is room. Room for them is made by *idle* tensors, whose next use is far
away, if they have a spare copy: they leave at once. So while memory is nearly full, spare copies of idle tensors are
made in the background. Only what left in the last step or in this one is copied: what was just used always has the
farthest next use, so without this limit each tensor would be copied after its use, whether it has to leave or not.
Nothing here waits for a transfer. Where the order has changed, something was read or copied in vain, and what is
missing is read at its use.

AutoSwap (Zhang et al. 2019) swaps variables of a step in this way, after a plan; its swap-ins are issued ahead of use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.memory.candidates import Candidates
    from torchdelta.runtime.memory.emptying import Emptying
    from torchdelta.runtime.memory.in_use import InUse
    from torchdelta.runtime.state.buffer import StorageRecord

__all__ = ["ReadAhead"]

_MAX_USES = 64  # how many of the next uses are looked at
_STRIDE_USES = 4  # how many uses pass between two looks
_MAX_COPIES = 8  # spare copies started at one look


class ReadAhead:
    """Decides what is read ahead and what is copied out ahead.

    Args:
        candidates: What may leave, and the order of uses.
        emptying: Moves it.
        in_use: What must stay.

    Attributes:
        window_bytes: How much is read ahead, and how much is kept ready to leave. 0: nothing.
        lacks: Returns how many bytes have to leave for a number of bytes to fit.
    """

    def __init__(self, candidates: Candidates, emptying: Emptying, in_use: InUse) -> None:
        self.window_bytes = 0
        self.lacks: Callable[[int], int] = _lacks_all
        self._candidates = candidates
        self._order = candidates.order
        self._emptying = emptying
        self._in_use = in_use
        self._looked_at = -_STRIDE_USES

    @property
    def is_due(self) -> bool:
        """Whether enough tensors have been used since the last look, and it is known what is used next."""
        order = self._order
        return order.count - self._looked_at >= _STRIDE_USES and self.window_bytes > 0 and order.length > 0

    def look(self) -> None:
        """Start transfers that the next uses need. Call it when that is due."""
        self._looked_at = self._order.count
        self._read_next()
        if self.lacks(self.window_bytes):
            self._copy_idle()

    def _read_next(self) -> None:
        by_key = self._candidates.by_key
        ahead_bytes = 0
        for key in self._order.upcoming(_MAX_USES):
            known = by_key.get(key)
            if known is None or known.record.emptied is None:
                continue
            content = known.record.emptied
            if content.transfer is None:
                if ahead_bytes and ahead_bytes + content.size_bytes > self.window_bytes:
                    return
                lacking_bytes = self.lacks(content.size_bytes + self.window_bytes // 2)
                if lacking_bytes:
                    clean = self._clean(lacking_bytes)
                    if sum(record.size_bytes for record in clean) < lacking_bytes:
                        return
                    if not self._empty(clean):
                        return
                if not self._emptying.start_refill(known.record):
                    return
            ahead_bytes += content.size_bytes

    def release_idle(self, size_bytes: int) -> None:
        """Empty idle tensors that have spare copies, until so many bytes are free."""
        clean = self._clean(size_bytes)
        if clean:
            self._empty(clean)

    def _empty(self, clean: list[StorageRecord]) -> bool:
        self._candidates.note_leaving(clean)
        return self._emptying.empty(clean)

    def _clean(self, size_bytes: int) -> list[StorageRecord]:
        """Return idle tensors that leave without a transfer: so many bytes of them, or all that there are."""
        candidates, emptying, locked = self._candidates, self._emptying, self._in_use.addresses()
        found: list[StorageRecord] = []
        for known in reversed(candidates.ranking()):
            if size_bytes <= 0 or not candidates.is_idle(known):
                break
            record = known.record
            if record.address not in locked and emptying.is_clean(record) and candidates.may_leave(known):
                found.append(record)
                size_bytes -= record.size_bytes
        return found

    def _copy_idle(self) -> None:
        """Start spare copies, so that a window of bytes can leave without waiting."""
        candidates, emptying, locked = self._candidates, self._emptying, self._in_use.addresses()
        ready_bytes = num_started = 0
        for known in reversed(candidates.ranking()):
            if ready_bytes >= self.window_bytes or num_started >= _MAX_COPIES or not candidates.is_idle(known):
                return
            record = known.record
            if not emptying.has_spare(record):
                if not candidates.will_leave(known):
                    continue
                # If the recorder does not know the content, nothing would show that it was overwritten.
                if record.current is None or record.address in locked or not candidates.may_leave(known):
                    continue
                if not emptying.make_spare(record):
                    return
                num_started += 1
            ready_bytes += record.size_bytes


def _lacks_all(size_bytes: int) -> int:
    return size_bytes
