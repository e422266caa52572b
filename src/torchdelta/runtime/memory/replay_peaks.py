"""How much memory replays will take, asked before a buffer is dropped: one that could not be recomputed is swapped.

[Note: replays that fit]
A replay holds what its ops still have to read, and each op that was dropped makes it longer. In a budget that is hardly
above what a single op needs, a policy that weighs only seconds drops so much that the replays do not fit, where copies
would have come back one at a time. So a buffer is dropped only if its own replay, and that of the latest dropped buffer
that reads it, fit beside what cannot leave: what the program holds, the gradients that the backward will add, and two
gradients of activations as large as the largest tensor that the replay makes or reads. A replay of one op always
counts as one that fits, because the op has run before.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torchdelta._torch.storages import storage_address
from torchdelta.aten.facts import Kind
from torchdelta.runtime.memory.costs import COST_WALK_OPS, is_missing
from torchdelta.runtime.state.instances import living_optimizers
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.state.buffer import Buffer, OpEntry
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["ExpectedGradients", "ReplayPeaks", "replay_peak_bytes"]

# Gradients of activations that are alive while a backward node needs a replay: the one that it reads, and one more of
# another branch.
_NUM_GRADIENTS = 2
# Optimizers are looked for again, once, if none is found: it may be built after the first forward.
_MOST_SEARCHES, _SEARCH_AGAIN_AFTER_OPS = 2, 1000
# How many readers of one buffer are remembered: backward brings the latest back first, and the others come next.
_MOST_READERS = 4
_LEAST_SWEEP = 256


class ReplayPeaks:
    """Estimates the memory that the replays of dropped buffers take."""

    def __init__(self) -> None:
        # By `Buffer.id`: the latest dropped buffers whose replays read it, by rising id.
        self._readers: dict[int, tuple[weakref.ref[Buffer], ...]] = {}
        self._sweep_above = _LEAST_SWEEP

    def may_drop(self, buffer: Buffer, free_bytes: int) -> bool:
        """Return whether replays fit in so many bytes once a buffer has been dropped, and if so, note that it will be.

        Args:
            buffer: A resident buffer.
            free_bytes: What is left of the budget beside what cannot leave.
        """
        chain = _Chain(buffer, None)
        if not chain.fits(free_bytes):
            return False
        readers = self._readers_of(buffer)
        if readers and not _Chain(readers[-1], buffer).fits(free_bytes):
            return False
        self._note(chain, [buffer, *readers])
        return True

    def forget(self) -> None:
        """Forget the dropped buffers."""
        self._readers.clear()

    def _note(self, chain: _Chain, readers: list[Buffer]) -> None:
        for source in chain.read:
            latest = {each.id: each for each in (*self._readers_of(source), *readers)}
            ids = sorted(latest)[-_MOST_READERS:]
            self._readers[source.id] = tuple(weakref.ref(latest[key]) for key in ids)
        if len(self._readers) > self._sweep_above:
            self._readers = {key: kept for key, kept in self._readers.items() if any(each() for each in kept)}
            self._sweep_above = max(_LEAST_SWEEP, 2 * len(self._readers))

    def _readers_of(self, buffer: Buffer) -> list[Buffer]:
        readers = (reference() for reference in self._readers.get(buffer.id, ()))
        return [reader for reader in readers if reader is not None and is_missing(reader)]


def replay_peak_bytes(buffer: Buffer) -> int:
    """Return the most that the replay of a buffer will hold at once, the memory of its ops included."""
    return _Chain(buffer, None).peak_bytes()


class _Chain:
    """The replay that brings back one buffer.

    Args:
        target: The buffer.
        dropped: A resident buffer that counts as dropped, too.
    """

    def __init__(self, target: Buffer, dropped: Buffer | None) -> None:
        self.read: dict[Buffer, int] = {}  # how often the replay reads each buffer
        self._missing: list[Buffer] = [target]
        stack = [target]
        while stack and len(self._missing) <= COST_WALK_OPS:
            entry = stack.pop().op
            for source in sources(entry) if entry is not None else ():
                if source.stays or _is_held_anyway(source):
                    continue
                num_reads = self.read.get(source, 0)
                self.read[source] = num_reads + 1
                if not num_reads and (source is dropped or _will_be_missing(source)):
                    self._missing.append(source)
                    stack.append(source)
        self._missing.sort(key=lambda buffer: buffer.id)
        self._target = target

    def fits(self, free_bytes: int) -> bool:
        """Return whether the replay fits beside gradients of activations. That of one op always does."""
        if len(self._missing) == 1:
            return True
        largest_bytes = max(buffer.size_bytes for buffer in (self._target, *self.read))
        return self.peak_bytes() + _NUM_GRADIENTS * largest_bytes <= free_bytes

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


def _is_held_anyway(buffer: Buffer) -> bool:
    """Return whether a buffer is an input that the program holds: a replay needs no memory to read it."""
    return buffer.op is None and buffer.strong is not None and not buffer.is_held_by_us_alone()


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
        found = self._find()
        clock = self._ledger.clock
        may_search = self._num_searches < _MOST_SEARCHES and clock - self._searched_at >= _SEARCH_AGAIN_AFTER_OPS
        if found is None and may_search:
            self._num_searches += 1
            self._searched_at = clock
            self._optimizers = [weakref.ref(optimizer) for optimizer in living_optimizers()]
            found = self._find()
        return sum(found.values()) if found is not None else 0

    def _find(self) -> dict[int, int] | None:
        """Return the bytes by the id of the parameter's record; None if no optimizer belongs to this scope."""
        found: dict[int, int] | None = None
        for reference in self._optimizers:
            optimizer = reference()
            sizes_bytes = self._find_of(optimizer) if optimizer is not None else None
            if sizes_bytes is not None:
                found = {**(found or {}), **sizes_bytes}
        return found

    def _find_of(self, optimizer: torch.optim.Optimizer) -> dict[int, int] | None:
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
        return found if is_used else None
