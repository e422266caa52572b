"""How much memory replays will take, asked before a buffer is dropped: one that could not be recomputed is swapped.

[Note: replays that fit]
A replay holds what its ops still have to read, and each op that was dropped makes it longer. In a budget that is hardly
above what a single op needs, a policy that weighs only seconds drops so much that the replays do not fit, where copies
would have come back one at a time. So a buffer is dropped only if its own replay, and the longest one that would go
through it, fit beside what cannot leave: what the program holds, the gradients that the backward will add, and two
gradients of activations as large as the largest tensor of the replay. A replay of one op always counts as one that
fits, because the op has run before.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.storages import storage_address
from torchdelta.aten.facts import Kind
from torchdelta.runtime.memory.costs import COST_WALK_OPS, is_missing
from torchdelta.runtime.state.instances import instances_of
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer, OpEntry
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["ExpectedGradients", "ReplayPeaks", "replay_peak_bytes"]

# Gradients of activations that are alive while a backward node needs a replay: the one that it reads, and one more of
# another branch.
_NUM_GRADIENTS = 2
# Optimizers are looked for again, once, if none is found: it may be built after the first forward.
_MOST_SEARCHES, _SEARCH_AGAIN_AFTER_OPS = 2, 1000


class ReplayPeaks:
    """Estimates the memory that the replays of dropped buffers take."""

    def __init__(self) -> None:
        self._readers: dict[int, weakref.ref[Buffer]] = {}  # by `Buffer.id`: the latest dropped buffer that reads it

    def fits(self, buffer: Buffer, free_bytes: int) -> bool:
        """Return whether replays fit in so many bytes once a buffer has been dropped."""
        chain = _Chain(buffer, None)
        if not chain.fits(free_bytes):
            return False
        reader = self._reader_of(buffer)
        return reader is None or _Chain(reader, buffer).fits(free_bytes)

    def note_dropped(self, buffer: Buffer) -> None:
        """Record what the replay of a buffer reads, which was just dropped."""
        latest = self._reader_of(buffer) or buffer
        reference = weakref.ref(latest)
        for source in _Chain(buffer, None).read:
            earlier = self._reader_of(source)
            if earlier is None or earlier.id < latest.id:
                self._readers[source.id] = reference

    def forget(self) -> None:
        """Forget the dropped buffers."""
        self._readers.clear()

    def _reader_of(self, buffer: Buffer) -> Buffer | None:
        reference = self._readers.get(buffer.id)
        reader = reference() if reference is not None else None
        return reader if reader is not None and is_missing(reader) else None


def replay_peak_bytes(buffer: Buffer) -> int:
    """Return the most that the replay of a buffer will hold at once, the memory of its ops included."""
    return _Chain(buffer, None).peak_bytes()


class _Chain:
    """The replay that brings back one buffer.

    Args:
        target: The buffer.
        dropped: One more that is as good as dropped.
    """

    def __init__(self, target: Buffer, dropped: Buffer | None) -> None:
        self.read: dict[Buffer, int] = {}  # how often the replay reads each buffer
        self._missing: list[Buffer] = [target]
        stack = [target]
        while stack and len(self._missing) <= COST_WALK_OPS:
            entry = stack.pop().op
            for source in sources(entry) if entry is not None else ():
                if source.stays:
                    continue
                num_reads = self.read.get(source, 0)
                self.read[source] = num_reads + 1
                if not num_reads and (source is dropped or _will_be_missing(source)):
                    self._missing.append(source)
                    stack.append(source)
        self._missing.sort(key=lambda buffer: buffer.id)
        self._target = target

    def fits(self, free_bytes: int) -> bool:
        """Return whether the replay takes at most so many bytes, or is that of one op."""
        if len(self._missing) == 1:
            return True
        sizes_bytes = [buffer.size_bytes for buffer in self.read]
        beside_bytes = _NUM_GRADIENTS * max(self._target.size_bytes, *sizes_bytes)
        return self.peak_bytes() + beside_bytes <= free_bytes

    def peak_bytes(self) -> int:
        """Return the most that the replay holds at once, the memory of its ops included."""
        left = dict(self.read)
        held: set[Buffer] = set()
        held_bytes = peak_bytes = 0
        for buffer in self._missing:
            entry = buffer.op
            if entry is None:
                continue
            read = [source for source in sources(entry) if source in left]
            if buffer not in held:
                for source in read:
                    if source not in held:
                        held.add(source)
                        held_bytes += source.size_bytes
                peak_bytes = max(peak_bytes, held_bytes + _memory_of(entry))
                for reference in entry.outputs:
                    made = reference()
                    if made is not None and made not in held and (left.get(made) or made is self._target):
                        held.add(made)
                        held_bytes += made.size_bytes
            for source in read:
                left[source] -= 1
                if not left[source] and source in held:
                    held.remove(source)
                    held_bytes -= source.size_bytes
        return peak_bytes


def _will_be_missing(buffer: Buffer) -> bool:
    """Return whether a replay in the backward has to recompute a buffer, as far as is known now."""
    if buffer.op is None or buffer.copy is not None:
        return False
    return buffer.num_saved == 0 or is_missing(buffer)  # what no saved tensor needs dies with its tensor


def _memory_of(entry: OpEntry) -> int:
    """Return what an op allocates in a replay."""
    if entry.facts.kind is Kind.WRITE and not entry.facts.keeps_statistics:
        made = (reference() for reference in entry.outputs)  # copies of what it overwrites
        return entry.workspace_bytes + sum(buffer.size_bytes for buffer in made if buffer is not None)
    return entry.workspace_bytes + entry.output_bytes


class ExpectedGradients:
    """Adds up the gradients that the optimizers' parameters do not have yet.

    Args:
        ledger: Knows the parameters that ops have read.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._num_searches = 0
        self._searched_at = -_SEARCH_AGAIN_AFTER_OPS

    def size_bytes(self) -> int:
        """Return the bytes of the gradients to come, of all optimizers with a parameter that this scope has read."""
        found = self._add_up()
        clock = self._ledger.clock
        if not found and self._num_searches < _MOST_SEARCHES and clock - self._searched_at >= _SEARCH_AGAIN_AFTER_OPS:
            self._num_searches += 1
            self._searched_at = clock
            optimizers = instances_of(torch.optim.Optimizer)
            self._optimizers = [weakref.ref(each) for each in optimizers if hasattr(each, "param_groups")]
            found = self._add_up()
        return sum(found.values())

    def _add_up(self) -> dict[int, int]:
        """Return the bytes by the id of the parameter's record."""
        found: dict[int, int] = {}
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                found.update(self._of(optimizer))
        return found

    def _of(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        find = self._ledger.records.get
        found: dict[int, int] = {}
        is_used = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                try:
                    record = find(storage_address(parameter))
                except RuntimeError:  # a subclass without a storage
                    continue
                if record is None:
                    continue
                is_used |= record.current is not None
                if parameter.requires_grad and parameter.grad is None:
                    found[record.id] = record.size_bytes
        return found if is_used else {}
