"""Makes room under the budget for the next allocation, by evicting buffers.

Everything calls `Room.make` before it allocates. The policy ranks which buffers leave. This file checks whether that
would free anything: evicting a buffer that the program also keeps alive frees nothing.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Final

from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import storage_behind
from torchdelta.runtime.memory.replay_peaks import ExpectedGradients, ReplayPeaks
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.state.kinds import byte_alias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.memory.costs import Costs
    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.policies.base import Policy
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.counters import Counters
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.usage import Usage

__all__ = ["LEAST_EVICTION_BYTES", "SMALL_PART", "NoRoomError", "Room", "collect_garbage", "digest_of"]

_logger = logging.getLogger("torchdelta")

# Smaller buffers are not evicted: the overhead outweighs the bytes freed.
LEAST_EVICTION_BYTES: Final = 4096
_NO_LIMIT: Final = (1 << 63) - 1
# How many ops a ranking is used for: scores change slowly, and computing them takes time.
RANKING_LIFE_OPS: Final = 24
# A small op, or a piece of lists ([Note: lists in pieces] in record/pieces.py), takes at most this part of the budget.
SMALL_PART: Final = 16


class NoRoomError(Exception):
    """There is no room for what need not be on the device yet."""


class Room:
    """Keeps `usage.total_bytes` at or under the budget.

    Args:
        ledger: The ledger.
        counters: Counts the evictions.
        transfers: Swaps buffers.
        costs: Passed to the policy.
        device: Rounds requests, and runs evictions exclusively.
        policy: Ranks the buffers that may leave.
        budget_bytes: The budget. None if decisions are forced, without a limit.
        on_shortage: Called with the bytes and the op for which no room can be made. Raises, or begins a survey.
        least_eviction_bytes: Smaller buffers stay.
        persistents: Evicts parameters, gradients and optimizer states where buffers are not enough; None: they stay.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        counters: Counters,
        transfers: Transfers,
        costs: Costs,
        device: Device,
        policy: Policy,
        budget_bytes: int | None,
        on_shortage: Callable[[int, str], None],
        least_eviction_bytes: int = LEAST_EVICTION_BYTES,
        persistents: Persistents | None = None,
    ) -> None:
        self.ledger = ledger
        self.usage = ledger.usage
        self.counters = counters
        self.transfers = transfers
        self.costs = costs
        self.device = device
        self.policy = policy
        self.budget_bytes = budget_bytes
        self.least_eviction_bytes = least_eviction_bytes
        self.persistents = persistents
        if persistents is not None:
            persistents.attach(budget_bytes, (budget_bytes or 0) // SMALL_PART, self)
        self.is_followed = False  # a program is carried out: only its misses are made up for here
        self.is_optional = False  # what room is made for now can wait: see `NoRoomError`
        self.num_waits = 0  # times that a followed step waited here
        self.unplanned_bytes = 0  # the most for which room was made beyond a program, since this was last set to 0
        self.find_more: Callable[[], bool] | None = None  # makes more buffers known that may leave
        self.digests = False  # verify="first-step": hash buffers when they are dropped
        self.largest_request_bytes = 0
        self.reserved_bytes = 0  # for an autograd node whose ops are not recorded, while it unpacks its saved tensors
        self.collected_bytes = 0  # freed by garbage collections so far
        self._on_shortage = on_shortage
        self._start_bytes = 0  # what was there when the scope began
        self._first_over_bytes: int | None = None  # what was there when the budget was too small for the first time
        self._ranking: list[tuple[Buffer, Action]] = []
        self._ranked_at = -1
        self._replays = ReplayPeaks()
        self._gradients = ExpectedGradients(ledger)
        self._free_bytes = _NO_LIMIT  # for replays, when the ranking was made

    def begin(self) -> None:
        """Note what is there: the scope begins."""
        self.usage.restart_peak()
        self._start_bytes = self.usage.total_bytes

    def make(self, size_bytes: int, why: str) -> None:
        """Make sure that `size_bytes` more fit under the budget.

        Raises:
            BudgetError: They do not fit, whatever is evicted (raised by `on_shortage`).
            NoRoomError: The same, for what can wait.
        """
        if self.transfers.leaving:
            self.transfers.reap()
        budget_bytes = self.budget_bytes
        if budget_bytes is None:
            return
        usage = self.usage
        if not self.device.counts_exactly:
            self.device.begin_request(usage, size_bytes, budget_bytes)
        self.largest_request_bytes = max(self.largest_request_bytes, size_bytes + usage.rounding_bytes)
        size_bytes += self.reserved_bytes
        usage.ask_counter()
        if usage.most_bytes + size_bytes <= budget_bytes:
            return
        if self.is_followed and self._fits_after_reading(size_bytes):
            return
        self._evict_down_to(budget_bytes - size_bytes)
        usage.ask_counter()
        if usage.most_bytes + size_bytes <= budget_bytes or self._fits_after_reading(size_bytes):
            return
        if self._may_wait(size_bytes, budget_bytes):
            return
        if not self.ledger.surveys:
            self.ledger.sweep()
            self.collect_garbage()
            self._evict_down_to(budget_bytes - size_bytes)  # buffers that garbage also kept alive
            usage.ask_counter()
        if usage.most_bytes + size_bytes <= budget_bytes:
            return
        if self.is_optional:
            raise NoRoomError
        if self.find_more is not None and self.find_more():
            self._evict_down_to(budget_bytes - size_bytes)
            usage.ask_counter()
        if usage.most_bytes + size_bytes > budget_bytes and self.transfers.end_pause():
            self._evict_down_to(budget_bytes - size_bytes)
            usage.ask_counter()
        if usage.most_bytes + size_bytes > budget_bytes:
            self._on_shortage(size_bytes + usage.uncertain_bytes, why)

    def _may_wait(self, size_bytes: int, budget_bytes: int) -> bool:
        """Return whether an op may pass the budget for now, because what was there at the start leaves it no room.

        Before the first op that reads a parameter it is not known what may leave, so a few small ops are let through.
        """
        persistents = self.persistents
        if persistents is None or persistents.candidates.has_found or self.ledger.surveys:
            return False
        if self._first_over_bytes is None:
            self._first_over_bytes = self.usage.total_bytes
        # What was loaded since the start may pass the budget already, too.
        before_bytes = self._first_over_bytes if self._first_over_bytes > budget_bytes else self._start_bytes
        return self.usage.total_bytes + size_bytes - before_bytes <= budget_bytes // SMALL_PART

    def begin_counting(self) -> int:
        """Read the counter. Return the count at which it has to be read again before more is allocated."""
        if self.budget_bytes is None:
            return _NO_LIMIT
        self.usage.ask_counter(fresh=True)
        return self.budget_bytes - self.device.unread_bytes(self.usage, self.budget_bytes)

    def _fits_after_reading(self, size_bytes: int) -> bool:
        """Return whether bytes fit once an expensive counter has been read; False for any other."""
        if self.device.counts_exactly or self.budget_bytes is None:
            return False
        self.usage.ask_counter(fresh=True)
        return self.usage.most_bytes + size_bytes <= self.budget_bytes

    def try_to_make(self, size_bytes: int, *, persistents: bool = False) -> None:
        """Evict until `size_bytes` more fit, as far as something can leave. A plan that is followed is left alone."""
        if self.budget_bytes is None or self.is_followed or self.ledger.surveys:
            return
        self.usage.ask_counter()
        if not self.has(size_bytes):
            self._evict_down_to(self.budget_bytes - size_bytes, persistents=persistents)

    def wait_for(self, size_bytes: int) -> bool:
        """Wait for copies out that a program has started, if `size_bytes` do not fit. Return whether they fit then."""
        budget_bytes, usage = self.budget_bytes, self.usage
        usage.ask_counter(fresh=True)
        if budget_bytes is None or self.has(size_bytes):
            return True
        with self.device.exclusive():
            self.num_waits += bool(self.transfers.leaving)
            self.transfers.finish_leaving(budget_bytes - size_bytes - usage.unseen_bytes - usage.uncertain_bytes)
        usage.ask_counter()
        return self.has(size_bytes)

    def has(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` fit without an eviction."""
        if self.budget_bytes is None:
            return True
        usage = self.usage
        if not self.device.counts_exactly:
            self.device.begin_request(usage, size_bytes, self.budget_bytes)
        if usage.most_bytes + size_bytes <= self.budget_bytes:
            return True
        return usage.total_bytes + size_bytes <= self.budget_bytes and self._fits_after_reading(size_bytes)

    def lacks(self, size_bytes: int) -> int:
        """Return how many bytes have to be evicted for `size_bytes` to fit beside what is reserved; 0: none."""
        if self.budget_bytes is None:
            return 0
        self.usage.ask_counter()
        return max(0, self.usage.most_bytes + self.reserved_bytes + size_bytes - self.budget_bytes)

    def collect_garbage(self) -> int:
        """Free what only reference cycles keep alive. Return the bytes."""
        # An op may be running. This extra handle keeps the tape from being cut, because the op may read from it.
        self.ledger.num_handles += 1
        try:
            freed_bytes = collect_garbage(self.usage)
            self.collected_bytes += freed_bytes
            return freed_bytes
        finally:
            self.ledger.drop_guard()

    def _evict_down_to(self, total_bytes: int, *, persistents: bool = True) -> None:
        counters = self.counters
        start_s = time.perf_counter()
        counted_s = counters.lost_s
        with self.device.exclusive():
            self._evict(total_bytes, persistents=persistents)
        # What was counted inside, such as a wait, is not counted twice.
        counters.evict_s += max(0.0, time.perf_counter() - start_s - (counters.lost_s - counted_s))

    def _evict(self, total_bytes: int, *, persistents: bool) -> None:
        usage, transfers = self.usage, self.transfers
        # Memory outside the known storages cannot be evicted, so the known ones have to make room for it.
        target_bytes = total_bytes - usage.unseen_bytes - usage.uncertain_bytes
        if self.is_followed:
            self.num_waits += bool(transfers.leaving)
            transfers.finish_leaving(target_bytes)  # the program waits here for a copy that it has started
            if self.persistents is not None:
                self.persistents.finish_leaving(target_bytes)
            if usage.live_bytes <= target_bytes:
                return
            self.counters.num_unplanned += 1
            self.unplanned_bytes = max(self.unplanned_bytes, usage.live_bytes - target_bytes)
        if persistents and self.persistents is not None:
            self.persistents.evict_idle(target_bytes)
            if usage.live_bytes <= target_bytes:
                return
        for attempt in range(2):
            if attempt or not self._ranking or self.ledger.clock - self._ranked_at > RANKING_LIFE_OPS:
                self.device.timer.poll(wait=True)  # on an accelerator the host waits here for the ops that run
                candidates = self._candidates()
                self._ranking = self.policy.rank(candidates, self.costs)
                self._ranking.reverse()  # taken from the end
                self._ranked_at = self.ledger.clock
                self._free_bytes = self._free_for_replays(candidates)
            projected_bytes = usage.live_bytes
            while self._ranking and projected_bytes > target_bytes:
                buffer, action = self._ranking.pop()
                if not self.is_evictable(buffer):
                    continue
                before_bytes = usage.live_bytes
                self.evict(buffer, self._possible(buffer, action), lazily=True)
                if buffer.strong is None:
                    projected_bytes -= before_bytes - usage.live_bytes
                elif buffer in transfers.leaving:
                    projected_bytes -= buffer.size_bytes
            if usage.live_bytes > target_bytes:
                transfers.finish_leaving(target_bytes)
            if usage.live_bytes <= target_bytes:
                return
        transfers.cancel_fetches(target_bytes)
        if persistents and self.persistents is not None and usage.live_bytes > target_bytes:
            self.persistents.evict(target_bytes)
        if usage.live_bytes > target_bytes:
            transfers.drain()

    def _free_for_replays(self, candidates: list[Buffer]) -> int:
        """Return what is left of the budget beside what cannot leave, now and in the backward; or no limit."""
        if self.budget_bytes is None or self.persistents is not None or not self.policy.may_swap:
            return _NO_LIMIT
        evictable_bytes = sum(buffer.size_bytes for buffer in candidates)
        return self.budget_bytes - self.usage.total_bytes + evictable_bytes - self._gradients.size_bytes()

    def _possible(self, buffer: Buffer, action: Action) -> Action:
        """Return the action that the policy has chosen; swap where replays would not fit ([Note: replays that fit])."""
        if action is Action.SWAP or buffer.copy is not None or self._free_bytes == _NO_LIMIT:
            return action
        if self._replays.may_drop(buffer, self._free_bytes) or not self.transfers.can_swap:
            return action
        return Action.SWAP

    def _candidates(self) -> list[Buffer]:
        return [buffer for buffer in list(self.ledger.held.values()) if self.is_evictable(buffer)]

    def evictable_bytes(self) -> int:
        """Return the bytes of the buffers that could be evicted now."""
        return sum(buffer.size_bytes for buffer in self._candidates())

    def is_evictable(self, buffer: Buffer) -> bool:
        """Return whether evicting this buffer now would free its bytes."""
        if buffer.stays or buffer.num_locks or buffer.size_bytes < self.least_eviction_bytes:
            return False
        if buffer.record is not None and buffer.record.emptied is not None:
            return False  # it has left in another way
        return buffer.is_held_by_us_alone()

    def evict(self, buffer: Buffer, action: Action, *, lazily: bool = False) -> None:
        """Evict a buffer. If the action is impossible, use the other one. If both are impossible, do nothing.

        Args:
            buffer: A held buffer.
            action: How it leaves.
            lazily: Whether to return while the copy is still in progress.
        """
        with self.device.exclusive():
            if buffer.strong is None:
                return
            if buffer.copy is None:  # with one, it leaves by that copy whatever the action
                can_replay = self.costs.is_replayable(buffer)
                if (action is Action.SWAP or not can_replay) and not self.transfers.copy_out(buffer) and not can_replay:
                    return
            self.counters.num_evictions += 1
            if buffer.num_saved and not buffer.has_left and not self.ledger.surveys:
                buffer.has_left = True
                self.counters.left_bytes += buffer.size_bytes
            if buffer.copy is not None:
                self.transfers.evict(buffer, lazily=lazily)
            else:
                self._drop(buffer)

    def _drop(self, buffer: Buffer) -> None:
        if self.digests and not self.ledger.surveys and buffer.strong is not None:
            buffer.digest = digest_of(storage_behind(buffer.strong))
        self.costs.note_dropped(buffer)
        if self.ledger.num_lost:
            self.costs.hold_sources(buffer)
        self.counters.dropped_bytes += buffer.size_bytes
        self.ledger.release(buffer)

    def evict_all(self) -> int:
        """Evict all buffers that can be evicted, and wait for the transfers. Return the bytes freed."""
        before_bytes = self.usage.live_bytes
        for buffer, action in self.policy.rank(self._candidates(), self.costs):
            if self.is_evictable(buffer):
                self.evict(buffer, action, lazily=True)
        self.transfers.finish_leaving()
        self.transfers.cancel_fetches(0)
        self.transfers.drain()
        self._ranking.clear()
        return before_bytes - self.usage.live_bytes

    def forget(self) -> None:
        """Forget all ranked, leaving, away and dropped buffers: no saved tensor is left that needs them."""
        self._ranking.clear()
        self.transfers.forget()
        self.costs.forget()
        self._replays.forget()


def digest_of(storage: torch.UntypedStorage) -> bytes:
    """Return a hash of a storage's content."""
    with Quietly():
        content = byte_alias(storage).cpu()
        return hashlib.blake2b(memoryview(content.numpy()), digest_size=16).digest()  # pyright: ignore[reportArgumentType]


def collect_garbage(usage: Usage) -> int:
    """Free what only reference cycles keep alive. Return by how many bytes that lowered the usage.

    Such cycles are common around a training loop: closures that refer to themselves, exceptions whose traceback holds a
    frame that refers to them, modules that refer to their parents. Python's collector runs after a number of new
    objects, however many bytes the cycles hold. Takes up to seconds in a process with many objects.
    """
    usage.ask_counter(fresh=True)
    before_bytes = usage.total_bytes
    gc.collect()
    usage.ask_counter(fresh=True)
    freed_bytes = max(before_bytes - usage.total_bytes, 0)
    if freed_bytes:
        _logger.debug("collected %d bytes that only reference cycles kept alive", freed_bytes)
    return freed_bytes
