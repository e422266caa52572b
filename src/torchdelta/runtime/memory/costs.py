"""What bringing a buffer back would cost, and whether a replay can do it. Asked by policies and before evictions."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torchdelta._torch.storages import storage_behind
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    import torch

    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Costs", "is_missing", "resident"]

# A cost estimate visits at most this many buffers: a longer chain is too expensive anyway.
COST_WALK_OPS = 400


class Costs:
    """Lists the dropped buffers, and estimates what bringing a buffer back costs.

    This is the interface that policies use (`policies.base.Costs`).
    """

    def __init__(self, ledger: Ledger, transfers: Transfers) -> None:
        self.ledger = ledger
        self.transfers = transfers
        self._dropped: dict[int, weakref.ref[Buffer]] = {}
        self._needed: set[int] = set()  # ids of the sources that replays of dropped buffers read
        self._needed_as_of = -1  # `Ledger.num_vacated` when `_needed` was computed; -1: it is out of date
        self._upstream: set[int] = set()  # `Buffer.id` of all that dropped buffers were made from, and what that was

    @property
    def clock(self) -> int:
        """The number of ops so far."""
        return self.ledger.clock

    @property
    def can_swap(self) -> bool:
        """Whether the tier takes copies now."""
        return self.transfers.can_swap

    def swap_time_s(self, buffer: Buffer) -> float:
        """Return the seconds that swapping a buffer out and in would take on an idle link."""
        return self.transfers.swap_time_s(buffer)

    def own_time_s(self, buffer: Buffer) -> float:
        """Return the seconds that a buffer's own op took, infinity without an op."""
        return buffer.op.time_s if buffer.op is not None else float("inf")

    def missing_time_s(self, target: Buffer) -> float:
        """Return the seconds that recomputing a buffer would take now.

        This includes its own op, the ops of all missing buffers above it, and swap-ins.
        """
        if target.op is None:
            return float("inf")
        time_s = target.op.time_s
        seen = {id(target)}
        stack = list(sources(target.op))
        while stack:
            buffer = stack.pop()
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if resident(buffer) is not None:
                continue
            if buffer.copy is not None:
                time_s += self.swap_time_s(buffer)
                continue
            if buffer.op is None or len(seen) > COST_WALK_OPS:
                return float("inf")
            time_s += buffer.op.time_s
            stack.extend(sources(buffer.op))
        return time_s

    # -- what was dropped

    def note_dropped(self, buffer: Buffer) -> None:
        """Record that a buffer was evicted without a copy."""
        self._dropped[id(buffer)] = weakref.ref(buffer)
        self._needed_as_of = -1

    def dropped(self) -> list[Buffer]:
        """Return the dropped buffers that may still be needed, those that the program holds included."""
        dropped: list[Buffer] = []
        for key, reference in list(self._dropped.items()):
            buffer = reference()
            if buffer is None or buffer.strong is not None or buffer.num_views == 0:
                del self._dropped[key]
            else:
                dropped.append(buffer)
        return dropped

    def misses_saved(self) -> bool:
        """Return whether a saved buffer is evicted and will have to be brought back."""
        evicted = (buffer for buffer in (*self.transfers.away, *self.dropped()) if buffer.num_saved)
        return any(resident(buffer) is None for buffer in evicted)

    # -- what a replay can do

    def is_replayable(self, target: Buffer) -> bool:
        """Return whether a buffer can be recomputed: no op of its replay chain reads overwritten content."""
        if target.op is None:
            return False
        if not self.ledger.num_lost:
            return True
        return all(source.op is not None for source in _read_by_replay(target) if is_missing(source))

    def is_needed_by_replay(self, buffer: Buffer) -> bool:
        """Return whether the replay of a dropped buffer reads this buffer."""
        if self._needed_as_of != self.ledger.num_vacated:
            self._needed_as_of = self.ledger.num_vacated
            self._needed = {id(source) for dropped in self.dropped() for source in _read_by_replay(dropped)}
        return id(buffer) in self._needed

    def note_lost(self, lost: Buffer) -> None:
        """Hold what replays of dropped buffers read and nothing could bring back later, now that `lost` is gone.

        A replay reads the nearest contents that are there. Such a content may leave later: its tensor dies, or no saved
        tensor needs it any more. With `lost` among what it was made from, its own op could not bring it back then.
        """
        dropped = self.dropped()
        if not dropped:
            self._upstream.clear()
            return
        self._upstream.update(buffer.id for buffer in _walk(dropped, self._upstream))
        if lost.id in self._upstream:
            for target in dropped:
                self.hold_sources(target)

    def hold_sources(self, target: Buffer) -> None:
        """Hold what a replay of `target` reads that is there, and that its own op could not bring back."""
        present = [source for source in _read_by_replay(target) if source.op is not None and not is_missing(source)]
        for source in present:
            if any(map(_is_lost, _walk([source], ()))):
                self.ledger.cannot_replay(source)

    def forget(self) -> None:
        """Forget the dropped buffers: no saved tensor is left that needs them."""
        self._dropped.clear()
        self._upstream.clear()
        self._needed_as_of = -1


def resident(buffer: Buffer) -> torch.UntypedStorage | None:
    """Return the living storage with a buffer's content, or None."""
    if buffer.strong is not None:
        return storage_behind(buffer.strong)
    record = buffer.record
    if record is not None and record.current is buffer:
        return record.storage()
    return None


def is_missing(buffer: Buffer) -> bool:
    """Return whether only a replay can bring a buffer back."""
    return buffer.copy is None and buffer.fetching is None and resident(buffer) is None


def _is_lost(buffer: Buffer) -> bool:
    return buffer.op is None and is_missing(buffer)


def _walk(targets: list[Buffer], known: Container[int]) -> Iterator[Buffer]:
    """Yield all buffers that these were made from, directly or not, except those with an id in `known`."""
    seen: set[int] = set()
    stack = list(targets)
    while stack:
        entry = stack.pop().op
        for source in sources(entry) if entry is not None else ():
            if source.id not in seen and source.id not in known:
                seen.add(source.id)
                stack.append(source)
                yield source


def _read_by_replay(target: Buffer) -> Iterator[Buffer]:
    """Yield the buffers that a replay reads: the sources of the buffer's op, and those of all missing buffers above."""
    seen: set[int] = set()
    stack = [target]
    while stack:
        buffer = stack.pop()
        if buffer.op is None:
            continue
        for source in sources(buffer.op):
            if id(source) not in seen:
                seen.add(id(source))
                yield source
                if is_missing(source):
                    stack.append(source)
