"""Residency: makes room before it is needed, by sending buffers away, and brings them back.

The one function that everything calls before it allocates is `room`. Who leaves is the policy's ranking; whether that
would free anything is checked here: evicting a buffer that somebody else keeps alive frees nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from typing import TYPE_CHECKING, Final

import torch

from torchdelta._torch import Quietly, storage_address, storage_num_holders
from torchdelta.errors import SavedTensorError, TierError, TierFullError, TierIOError
from torchdelta.runtime import faults
from torchdelta.runtime.action import Action
from torchdelta.runtime.buffer import Buffer, Fetch, SurveyedCopy, TierCopy
from torchdelta.runtime.outage import Outage
from torchdelta.runtime.resized import check_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.counters import Counters
    from torchdelta.runtime.ledger import Ledger
    from torchdelta.runtime.react.base import Policy
    from torchdelta.runtime.tiers.base import Tier

# Smaller buffers are not worth an eviction: their copy costs more in bookkeeping than it frees.
LEAST_EVICTION_BYTES: Final = 4096
# DELTA 2022 brings back at most five offloaded tensors ahead of their use (papers.md 1.2).
PREFETCH_DEPTH: Final = 5
# A ranking is used for this many ops before it is made anew: scores change slowly, and scoring costs.
RANKING_LIFE_OPS: Final = 24


class Residency:
    """Keeps `ledger.total_bytes` at or under the budget."""

    def __init__(
        self,
        ledger: Ledger,
        counters: Counters,
        policy: Policy,
        open_tier: Callable[[], Tier],
        budget_bytes: int | None,
    ) -> None:
        self.ledger = ledger
        self.counters = counters
        self.policy = policy
        self.budget_bytes = budget_bytes
        self.least_eviction_bytes = LEAST_EVICTION_BYTES
        self.recompute: Callable[[Buffer], torch.UntypedStorage]
        self.on_shortage: Callable[[int, str], None]
        self.collect_garbage: Callable[[], int]
        self.digests = False  # verify="first-step": hash what is dropped
        self.prefetches = True
        self.surveys = False  # an impossible budget is being surveyed: count, but move nothing
        self._open_tier = open_tier
        self._tier: Tier | None = None
        self.outage = Outage()
        self._ranking: list[tuple[Buffer, Action]] = []
        self._ranked_at = -1
        self.leaving: list[Buffer] = []  # on their way out, still resident
        self.away: list[Buffer] = []  # swapped out; sorted by the order of saving when backward needs it (a stack)
        self._away_is_sorted = True
        self.largest_request_bytes = 0
        self.reserved_bytes = 0  # by a node of backward that runs unseen, while its saved tensors come back
        self._dropped: dict[int, weakref.ref[Buffer]] = {}
        self.missing_time_s: Callable[[Buffer], float]

    @property
    def tier(self) -> Tier:
        """The tier, opened at its first use."""
        if self._tier is None:
            self._tier = self._open_tier()
        return self._tier

    @property
    def opened_tier(self) -> Tier | None:
        """The tier if anything was ever swapped."""
        return self._tier

    def _working_tier(self) -> Tier | None:
        """Return the tier, or None while it cannot be opened or is left alone after a failure."""
        if self.outage.is_on(self.ledger.clock):
            return None
        try:
            return self.tier
        except (TierError, MemoryError) as error:  # it may be opened because memory has run out
            if faults.is_disabled("tier-failure"):
                raise
            self.outage.begin(self.ledger.clock, error)
            return None

    # -- room

    def room(self, size_bytes: int, why: str) -> None:
        """Make sure that `size_bytes` more fit under the budget.

        Raises BudgetError (through `on_shortage`) when they cannot.
        """
        if self.leaving:
            self.reap()
        budget_bytes = self.budget_bytes
        if budget_bytes is None:
            return
        self.largest_request_bytes = max(self.largest_request_bytes, size_bytes)
        size_bytes += self.reserved_bytes
        ledger = self.ledger
        ledger.ask_counter()
        if ledger.total_bytes + size_bytes <= budget_bytes:
            return
        self._make_room(budget_bytes - size_bytes)
        ledger.ask_counter()
        if ledger.total_bytes + size_bytes > budget_bytes and not self.surveys:
            self.collect_garbage()
            self._make_room(budget_bytes - size_bytes)  # what garbage held as well may leave now
            ledger.ask_counter()
        if ledger.total_bytes + size_bytes > budget_bytes:
            self.on_shortage(size_bytes, why)

    def _make_room(self, total_bytes: int) -> None:
        ledger = self.ledger
        # What no known storage accounts for cannot leave: the known ones have to make room for it.
        target_bytes = total_bytes - ledger.unseen_bytes
        for attempt in range(2):
            if attempt or not self._ranking or ledger.clock - self._ranked_at > RANKING_LIFE_OPS:
                self._ranking = self.policy.rank(self._candidates(), self)
                self._ranking.reverse()  # taken from the end
                self._ranked_at = ledger.clock
            projected_bytes = ledger.live_bytes
            while self._ranking and projected_bytes > target_bytes:
                buffer, action = self._ranking.pop()
                if not self.is_evictable(buffer):
                    continue
                before_bytes = ledger.live_bytes
                self.evict(buffer, action, lazily=True)
                if buffer.strong is None:
                    projected_bytes -= before_bytes - ledger.live_bytes
                elif buffer in self.leaving:
                    projected_bytes -= buffer.size_bytes
            if ledger.live_bytes > target_bytes:
                self._wait_for_leaving(target_bytes)
            if ledger.live_bytes <= target_bytes:
                return
        self._cancel_fetches(target_bytes)
        if ledger.live_bytes > target_bytes and self._tier is not None:
            self._tier.drain()  # copies that nobody wants any more still hold their storages

    def _candidates(self) -> list[Buffer]:
        return [buffer for buffer in list(self.ledger.held.values()) if self.is_evictable(buffer)]

    def is_evictable(self, buffer: Buffer) -> bool:
        """Say whether evicting this buffer now would free its bytes."""
        strong = buffer.strong
        if strong is None or buffer.is_pinned or buffer.num_locks or buffer.size_bytes < self.least_eviction_bytes:
            return False
        # Our alias and the storage's own Python object are two holders; a third is somebody else, and then evicting
        # frees nothing.
        return storage_num_holders(storage_address(strong)) <= 2

    def _wait_for_leaving(self, target_bytes: int) -> None:
        while self.leaving and self.ledger.live_bytes > target_bytes:
            buffer = self.leaving.pop(0)
            self._finish_leaving(buffer)

    def reap(self) -> None:
        """Let go of what has arrived on the tier, without waiting."""
        while self.leaving and (self.leaving[0].copy is None or self.leaving[0].copy.is_there()):
            self._finish_leaving(self.leaving.pop(0))

    def see_off(self) -> None:
        """Wait until everybody who is leaving has left."""
        while self.leaving:
            self._finish_leaving(self.leaving.pop(0))

    def _finish_leaving(self, buffer: Buffer) -> None:
        if buffer.copy is None or buffer.strong is None:
            return
        if self.settle_copy(buffer):
            self.ledger.let_go(buffer)  # else it stays, or is dropped when it can be recomputed

    def settle_copy(self, buffer: Buffer) -> bool:
        """Wait for a copy that the tier still takes from a buffer's storage; one that failed is no copy."""
        if buffer.copy is None:
            return False
        try:
            self.counters.stall_s += buffer.copy.arrive()
        except TierError as error:
            if faults.is_disabled("tier-failure"):
                raise
            buffer.copy = None  # the source is untouched
            self.outage.begin(self.ledger.clock, error)
            return False
        self.outage.end()
        return True

    def send_all_away(self) -> int:
        """Evict all that can be evicted, and wait until it has gone. Returns the bytes that this freed."""
        before_bytes = self.ledger.live_bytes
        for buffer, action in self.policy.rank(self._candidates(), self):
            if self.is_evictable(buffer):
                self.evict(buffer, action, lazily=True)
        self.see_off()
        self._cancel_fetches(0)
        if self._tier is not None:
            self._tier.drain()
        self._ranking.clear()
        return before_bytes - self.ledger.live_bytes

    def _cancel_fetches(self, target_bytes: int) -> None:
        for buffer in list(self.away):
            if self.ledger.live_bytes <= target_bytes:
                return
            if buffer.fetching is not None and buffer.num_locks == 0:
                fetch, buffer.fetching = buffer.fetching, None
                with contextlib.suppress(TierError):
                    self.counters.stall_s += fetch.transfer.wait()
                del fetch  # frees its storage

    # -- leaving

    def evict(self, buffer: Buffer, action: Action, *, lazily: bool = False) -> None:
        """Send a buffer away.

        `lazily`: a copy may still be under way when this returns (`leaving`). Falls back on the other action, else
        keeps.
        """
        if buffer.strong is None:
            return
        if action is Action.DROP and buffer.op is None and buffer.copy is None:
            action = Action.SWAP
        if action is Action.SWAP and buffer.copy is None and not self._write(buffer):
            if buffer.op is None:
                return
            action = Action.DROP
        self.counters.num_evictions += 1
        if action is Action.DROP or buffer.copy is None:
            if self.digests and buffer.copy is None and not self.surveys:
                buffer.digest = digest_of(buffer.strong.untyped_storage())
            self.counters.dropped_bytes += buffer.size_bytes
            if buffer.copy is None:
                self._dropped[id(buffer)] = weakref.ref(buffer)
            self.ledger.let_go(buffer)
            return
        self.away.append(buffer)
        self._away_is_sorted = False
        if lazily and not buffer.copy.is_there():
            self.leaving.append(buffer)
        else:
            self._finish_leaving(buffer)

    def _write(self, buffer: Buffer) -> bool:
        if buffer.strong is None or buffer.strong.untyped_storage().nbytes() < buffer.size_bytes:
            return False
        if self.surveys:
            if self.outage.is_on(self.ledger.clock):
                return False
            buffer.copy = SurveyedCopy()
            return True
        buffer.copy = self._start_copy(buffer.strong.untyped_storage())
        return buffer.copy is not None

    def _start_copy(self, storage: torch.UntypedStorage) -> TierCopy | None:
        """Start copying a storage to the tier; None where the tier has no room or does not work."""
        tier = self._working_tier()
        if tier is None:
            return None
        try:
            copy = TierCopy(tier, tier.reserve(storage.nbytes()), None, storage)  # owns the slot from here on
            copy.transfer = tier.write(copy.slot, storage)
        except TierFullError:
            if faults.is_disabled("tier-full"):
                raise
            return None
        except TierError as error:
            if faults.is_disabled("tier-failure"):
                raise
            self.outage.begin(self.ledger.clock, error)
            return None
        self.counters.swapped_out_bytes += storage.nbytes()
        return copy

    def preserve(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Copy a buffer's content before an op overwrites it.

        Something recorded still depends on it, and nothing can recompute it.
        """
        self.counters.num_copies_before_write += 1
        if self.surveys:
            buffer.copy = SurveyedCopy()
            return
        with Quietly():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            if buffer.size_bytes >= self.least_eviction_bytes * 16:
                buffer.copy = self._start_copy(storage)
                if self.settle_copy(buffer):
                    return
            self.room(buffer.size_bytes, "copy before an in-place op")
            alias = source.clone()
            self.adopt(buffer, alias.untyped_storage(), held=True)

    # -- coming back

    def resident(self, buffer: Buffer) -> torch.UntypedStorage | None:
        """Return the living storage with this buffer's content, or None."""
        if buffer.strong is not None:
            return buffer.strong.untyped_storage()
        record = buffer.record
        if record is not None and record.current is buffer:
            return record.storage()
        return None

    def bring(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return a storage with this buffer's content, swapping it in or recomputing it when it is away."""
        storage = self.resident(buffer)
        buffer.last_used = self.ledger.clock
        if storage is not None:
            check_size(buffer, storage)
            return storage
        if buffer.fetching is not None:
            fetch, buffer.fetching = buffer.fetching, None
            try:
                self.counters.stall_s += fetch.transfer.wait()
                self.adopt(buffer, fetch.storage)
                return fetch.storage
            except TierError:
                fetch = None  # its storage is of no use; the copy is tried once more below
        if buffer.copy is not None:
            try:
                return self._read(buffer)
            except TierError as error:
                self.outage.begin(self.ledger.clock, error)
                if buffer.op is None or faults.is_disabled("tier-failure"):
                    msg = (
                        f"a saved {buffer.origin or 'tensor'} of {buffer.size_bytes} bytes cannot be had back: {error}"
                    )
                    raise TierIOError(msg) from error  # the copy stays: a later try may find the disk well again
                buffer.copy = None
        if buffer.op is None:
            msg = (
                f"the content of a saved {buffer.origin or 'tensor'} of {buffer.size_bytes} bytes is gone: "
                "it was overwritten where nobody could see it"
            )
            raise SavedTensorError(msg)
        return self.recompute(buffer)

    def _read(self, buffer: Buffer) -> torch.UntypedStorage:
        copy = buffer.copy
        assert copy is not None
        self.room(buffer.size_bytes, "swap-in")
        storage = torch.UntypedStorage(buffer.size_bytes, device=self.ledger.new_device)
        self.ledger.know(storage)
        if not self.surveys:
            self.counters.stall_s += copy.arrive()
            self.counters.stall_s += copy.tier.read(copy.slot, storage).wait()
            self.counters.swapped_in_bytes += buffer.size_bytes
        self.adopt(buffer, storage)  # not before it is filled: after a failed read the buffer is as far away as before
        return storage

    def adopt(self, buffer: Buffer, storage: torch.UntypedStorage, *, held: bool = False) -> None:
        """Make `storage` the home of a buffer. It is kept alive while somebody saved it, or when `held`."""
        record = self.ledger.know(storage)
        if record.current is not None and record.current is not buffer and record.current.record is record:
            record.current.record = None
        record.current = buffer
        buffer.record = record
        buffer.last_used = self.ledger.clock
        if self.ledger.trace is not None:
            self.ledger.trace.on_return(buffer, record)
        if (held or buffer.num_saved) and buffer.strong is None:
            alias = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
            buffer.strong = buffer.witness = alias
            buffer.witness_version = alias._version
            buffer.keeper = self.ledger
            self.ledger.held[id(buffer)] = buffer

    def prefetch(self, save_order: int) -> None:
        """Start bringing back the swapped buffers that backward wants next, while they fit without an eviction.

        Those are the ones saved last before `save_order`.
        """
        budget_bytes = self.budget_bytes
        away = self.away
        if not self._away_is_sorted:
            away.sort(key=_save_order)
            self._away_is_sorted = True
        while away and (
            away[-1].num_saved == 0
            or away[-1].copy is None
            or (away[-1].save_order >= save_order and away[-1].strong is not None)
        ):
            away.pop()
        depth = 0
        for buffer in reversed(away):
            if depth >= PREFETCH_DEPTH:
                return
            if buffer.num_saved == 0 or buffer.copy is None or buffer.strong is not None:
                continue
            depth += 1
            if buffer.fetching is not None or self.resident(buffer) is not None:
                continue
            if (
                budget_bytes is not None
                and self.ledger.total_bytes + buffer.size_bytes + 2 * self.largest_request_bytes > budget_bytes
            ):
                return
            with Quietly():
                storage = torch.UntypedStorage(buffer.size_bytes, device=self.ledger.device)
            self.ledger.know(storage)
            buffer.fetching = Fetch(buffer.copy, storage)
            self.counters.swapped_in_bytes += buffer.size_bytes

    # -- what it would cost

    def swap_time_s(self, buffer: Buffer) -> float:
        """Return the seconds that sending a buffer away and back would take on an idle link.

        Half of it when its copy is there already.
        """
        tier = buffer.copy.tier if buffer.copy is not None and not self.surveys else self._working_tier()
        if tier is None:
            return float("inf")
        time_s = buffer.size_bytes / tier.read_bytes_per_s
        if buffer.copy is None:
            time_s += buffer.size_bytes / tier.write_bytes_per_s
        return time_s

    @property
    def clock(self) -> int:
        """Ops so far."""
        return self.ledger.clock

    def own_time_s(self, buffer: Buffer) -> float:
        """Return the seconds that a buffer's own op took."""
        return buffer.op.time_s if buffer.op is not None else float("inf")

    def dropped(self) -> list[Buffer]:
        """Return the buffers that are away and would be recomputed."""
        away: list[Buffer] = []
        for key, reference in list(self._dropped.items()):
            buffer = reference()
            if buffer is None or self.resident(buffer) is not None or buffer.num_views == 0:
                del self._dropped[key]
            else:
                away.append(buffer)
        return away

    def misses_saved(self) -> bool:
        """Say whether a saved buffer is away and will have to come back."""
        gone = (buffer for buffer in (*self.away, *self.dropped()) if buffer.num_saved)
        return any(self.resident(buffer) is None for buffer in gone)

    @property
    def can_swap(self) -> bool:
        """Whether the tier takes copies now."""
        return self._working_tier() is not None

    def note_stall(self) -> None:
        """Count how long a device with streams has stood still; see `Tier.take_stall_s`."""
        if self._tier is not None:
            self.counters.stall_s += self._tier.take_stall_s()

    def forget(self) -> None:
        """Nothing saved is left: nobody is leaving, away or ranked."""
        self.leaving.clear()
        self.away.clear()
        self._ranking.clear()
        self._dropped.clear()

    def close(self) -> None:
        """Give the tier back."""
        self.note_stall()
        if self._tier is not None:
            self._tier.close()


def _save_order(buffer: Buffer) -> int:
    return buffer.save_order


def digest_of(storage: torch.UntypedStorage) -> bytes:
    """Return a hash of a storage's content."""
    with Quietly():
        content = (
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,)).cpu()
        )
        return hashlib.blake2b(memoryview(content.numpy()), digest_size=16).digest()  # pyright: ignore[reportArgumentType]
