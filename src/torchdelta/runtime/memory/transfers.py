"""Transfers of buffers to the tier and back: those in progress, and the copies that exist."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Final

from torchdelta._torch.storages import storage_behind
from torchdelta.errors import TierError, TierFullError
from torchdelta.notices import warn_once
from torchdelta.runtime.memory.outage import Outage
from torchdelta.runtime.state.copies import Fetch, SurveyedCopy, TierCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.counters import Counters
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.tiers.base import Tier

__all__ = ["Transfers"]

_BLOCK_BYTES: Final = 4096  # the largest block to which a tier rounds slots up


class Transfers:
    """Moves buffers to a tier and back. In a survey, nothing is moved."""

    def __init__(self, ledger: Ledger, counters: Counters, open_tier: Callable[[], Tier]) -> None:
        self.ledger = ledger
        self.counters = counters
        self.outage = Outage()
        self.leaving: list[Buffer] = []  # their copy to the tier is in progress
        # Swapped out. Weak references: a buffer keeps its op, and the op keeps tensors that it reads.
        self._away: list[weakref.ref[Buffer]] = []
        self._away_is_sorted = True  # by `save_order`: a stack, from which backward takes
        self.lacked_capacity = False  # whether a survey could not swap a buffer because the tier would have been full
        self.surveyed_outage = ""  # why the tier does not work, throughout a survey
        self._surveyed_bytes = 0  # of the copies that a survey pretends to make
        self._open_tier = open_tier
        self._tier: Tier | None = None
        self._is_without_tier = False
        self._was_full = False
        self._full_at_bytes: int | None = None  # what the tier held when its disk or the host's memory was full

    # -- the tier

    @property
    def tier(self) -> Tier:
        """The tier, opened at its first use."""
        if self._tier is None:
            self._tier = self._open_tier()
        return self._tier

    @property
    def opened_tier(self) -> Tier | None:
        """The tier, or None if it was never used."""
        return self._tier

    @property
    def can_swap(self) -> bool:
        """Whether the tier takes copies now."""
        return self._working_tier() is not None

    def _working_tier(self) -> Tier | None:
        """Return the tier; None inside `without_tier`, if it cannot be opened, and for a while after a failure."""
        if self._is_without_tier or self.surveyed_outage or self.outage.is_on(self.ledger.clock):
            return None
        try:
            return self.tier
        except (TierError, MemoryError) as error:  # it may be opened because memory has run out
            self.outage.begin(self.ledger.clock, error)
            return None

    def free_bytes(self) -> int | None:
        """Return how many more bytes the tier takes now; None where there is no limit."""
        tier = self._working_tier()
        if tier is None:
            return 0
        capacity_bytes = self._capacity_bytes(tier)
        return None if capacity_bytes is None else max(0, capacity_bytes - tier.used_bytes - self._surveyed_bytes)

    def _capacity_bytes(self, tier: Tier) -> int | None:
        """Return what the tier can hold as far as is known; None where there is no limit."""
        limits_bytes = (tier.capacity_bytes, self._full_at_bytes)
        return min((limit_bytes for limit_bytes in limits_bytes if limit_bytes is not None), default=None)

    def end_pause(self) -> bool:
        """Let the tier be tried again although an outage is on. Return whether one was; in a survey it goes on."""
        return not self.ledger.surveys and self.outage.end_pause(self.ledger.clock)

    def begin_survey(self) -> None:
        """Use the tier for all of a survey as it is now: working, or in an outage."""
        self.lacked_capacity = False
        self.surveyed_outage = self.outage.reason if self.outage.is_on(self.ledger.clock) else ""

    def end_survey(self) -> None:
        """Use the tier as it is at each op."""
        self.surveyed_outage = ""

    @contextlib.contextmanager
    def without_tier(self) -> Generator[None]:
        """Return a context in which nothing is copied out, and the tier is not opened."""
        self._is_without_tier = True
        try:
            yield
        finally:
            self._is_without_tier = False

    def swap_time_s(self, buffer: Buffer) -> float:
        """Return the seconds that swapping a buffer out and in would take on an idle link.

        If it has a copy already, only the way back counts.
        """
        is_real = buffer.copy is not None and not self.ledger.surveys
        tier = buffer.copy.tier if buffer.copy is not None and is_real else self._working_tier()
        if tier is None:
            return float("inf")
        time_s = buffer.size_bytes / tier.read_bytes_per_s
        if buffer.copy is None:
            time_s += buffer.size_bytes / tier.write_bytes_per_s
        return time_s

    def drain(self) -> None:
        """Wait for all transfers: even those that are not needed any more keep their storages alive."""
        if self._tier is not None:
            self._tier.drain()

    def note_stall(self) -> None:
        """Count how long a device with streams was stalled. See `Tier.take_stall_s`."""
        if self._tier is not None:
            self.counters.stall_s += self._tier.take_stall_s()

    # -- out

    def copy_out(self, buffer: Buffer) -> bool:
        """Start copying a held buffer to the tier. Return whether that was possible."""
        strong = buffer.strong
        if strong is None or storage_behind(strong).nbytes() < buffer.size_bytes:
            return False
        return self.copy_storage(buffer, storage_behind(strong))

    def copy_storage(self, buffer: Buffer, storage: torch.UntypedStorage) -> bool:
        """Start copying a storage with a buffer's content to the tier. Return whether that was possible."""
        copy = self._survey_copy(storage.nbytes()) if self.ledger.surveys else self.start_copy(storage)
        if copy is None:
            return False
        self.ledger.copied(buffer, copy)
        return True

    def start_copy(self, storage: torch.UntypedStorage) -> TierCopy | None:
        """Start copying a storage to the tier. Return None if the tier is full or does not work."""
        tier = self._working_tier()
        if tier is None:
            return None
        try:
            copy = TierCopy(tier, tier.reserve(storage.nbytes()), None, storage)  # releases the slot if `write` raises
            copy.transfer = tier.write(copy.slot, storage)
        except TierError as error:
            self.note_failed_start(error, tier, storage.nbytes())
            return None
        if self._full_at_bytes is not None and tier.used_bytes > self._full_at_bytes:
            self._full_at_bytes = None  # there is space again
        self.counters.swapped_out_bytes += storage.nbytes()
        return copy

    def _survey_copy(self, size_bytes: int) -> SurveyedCopy | None:
        """Return a copy without content, or None if the tier would be full or does not work."""
        tier = self._working_tier()
        if tier is None:
            return None
        size_bytes += -size_bytes % _BLOCK_BYTES
        capacity_bytes = self._capacity_bytes(tier)
        if capacity_bytes is not None and tier.used_bytes + self._surveyed_bytes + size_bytes > capacity_bytes:
            self.lacked_capacity = True
            return None
        self._surveyed_bytes += size_bytes
        return SurveyedCopy(size_bytes, self._end_surveyed_copy)

    def _end_surveyed_copy(self, size_bytes: int) -> None:
        self._surveyed_bytes -= size_bytes

    def note_failed_start(self, error: TierError, tier: Tier, size_bytes: int) -> None:
        """Begin an outage, unless the tier is only full: a smaller copy may still fit. Warn of the first full one."""
        if not isinstance(error, TierFullError):
            self.outage.begin(self.ledger.clock, error)
            return
        if tier.capacity_bytes is None or tier.used_bytes + size_bytes <= tier.capacity_bytes:
            self._full_at_bytes = tier.used_bytes
        if not self._was_full:
            self._was_full = True
            warn_once(f"{error}: what finds no room there is recomputed if possible, and stays on the device if not")

    def finish_copy(self, buffer: Buffer) -> bool:
        """Wait for the copy of a buffer to arrive on the tier. Forget the copy if it failed.

        Returns:
            Whether the buffer has a copy now.
        """
        if buffer.copy is None:
            return False
        if not self.arrive(buffer.copy):
            self.ledger.uncopied(buffer)  # the source is untouched
            return False
        return True

    def arrive(self, copy: TierCopy) -> bool:
        """Wait for a copy to arrive on the tier. Return whether it did."""
        is_new = copy.transfer is not None  # one that arrived earlier does not show that the tier works now
        try:
            self.counters.stall_s += copy.arrive()
        except TierError as error:
            self.outage.begin(self.ledger.clock, error)
            return False
        if is_new:
            self.outage.end()
        return True

    def evict(self, buffer: Buffer, *, lazily: bool) -> None:
        """Release a buffer that has a copy.

        Args:
            buffer: Held, with a copy.
            lazily: Return while the copy is in progress. `reap` and `finish_leaving` release the buffer later.
        """
        assert buffer.copy is not None
        self._away.append(weakref.ref(buffer))
        self._away_is_sorted = False
        if lazily and not buffer.copy.is_there():
            self.ledger.leave(buffer)
            self.leaving.append(buffer)
        else:
            self._release(buffer)

    def reap(self) -> None:
        """Release the buffers whose copies have arrived on the tier, without waiting."""
        while self.leaving and (self.leaving[0].copy is None or self.leaving[0].copy.is_there()):
            self._release(self.leaving.pop(0))

    def finish_leaving(self, target_bytes: int | None = None) -> None:
        """Wait until all leaving buffers are released, or until no more than `target_bytes` live."""
        while self.leaving and (target_bytes is None or self.ledger.usage.live_bytes > target_bytes):
            self._release(self.leaving.pop(0))

    def finish_first(self) -> None:
        """Wait until the first of the leaving buffers is released."""
        self._release(self.leaving.pop(0))

    def stop_leaving(self, buffer: Buffer) -> None:
        """Keep a buffer that was leaving."""
        if buffer in self.leaving:
            self.leaving.remove(buffer)
            self.ledger.unleave(buffer)

    def _release(self, buffer: Buffer) -> None:
        # If the copy failed, the buffer stays. It may be dropped later if it can be recomputed.
        if buffer.copy is not None and buffer.strong is not None and self.finish_copy(buffer):
            self.ledger.release(buffer)

    # -- back

    def read(self, copy: TierCopy, storage: torch.UntypedStorage) -> None:
        """Fill a storage from a copy, and wait for the transfer.

        Raises:
            TierError: The copy cannot be read.
        """
        if self.ledger.surveys:
            return
        self.counters.stall_s += copy.arrive()
        self.counters.stall_s += copy.tier.read(copy.slot, storage).wait()
        self.counters.swapped_in_bytes += storage.nbytes()

    def start_fetch(self, buffer: Buffer, copy: TierCopy, storage: torch.UntypedStorage) -> None:
        """Start bringing a buffer back into a new storage, ahead of its use."""
        self.ledger.know(storage)
        self.ledger.fetch(buffer, Fetch(copy, storage))
        self.counters.swapped_in_bytes += buffer.size_bytes

    def take_fetched(self, buffer: Buffer) -> torch.UntypedStorage | None:
        """Wait for a buffer's fetch and return its storage. Return None if there is no fetch, or if it failed."""
        fetch = self.ledger.unfetch(buffer)
        if fetch is None:
            return None
        try:
            self.counters.stall_s += fetch.transfer.wait()
        except TierError:
            return None  # the caller reads the copy once more
        return fetch.storage

    @property
    def away(self) -> list[Buffer]:
        """The buffers that were swapped out, those that were brought back since included."""
        return [buffer for reference in self._away if (buffer := reference()) is not None]

    def needed_before(self, save_order: int, most: int) -> list[Buffer]:
        """Return at most so many swapped buffers that backward needs next: those saved last before `save_order`."""
        away = self._away
        if not self._away_is_sorted:
            away[:] = map(weakref.ref, sorted(self.away, key=lambda buffer: buffer.save_order))
            self._away_is_sorted = True
        while away and (
            (last := away[-1]()) is None
            or last.num_saved == 0
            or last.copy is None
            or (last.save_order >= save_order and last.strong is not None)
        ):
            away.pop()
        needed: list[Buffer] = []
        for reference in reversed(away):
            buffer = reference()
            if buffer is not None and buffer.num_saved and buffer.copy is not None and buffer.strong is None:
                needed.append(buffer)
                if len(needed) == most:
                    break
        return needed

    def forget_unsaved(self) -> None:
        """Forget the swapped buffers that no saved tensor needs."""
        if self._away:
            self._away[:] = [weakref.ref(buffer) for buffer in self.away if buffer.num_saved]

    def cancel_fetches(self, target_bytes: int) -> None:
        """Give up fetches until no more than `target_bytes` live."""
        for buffer in self.away:
            if self.ledger.usage.live_bytes <= target_bytes:
                return
            if buffer.fetching is not None and buffer.num_locks == 0:
                fetch = self.ledger.unfetch(buffer)
                if fetch is not None:
                    with contextlib.suppress(TierError):
                        self.counters.stall_s += fetch.transfer.wait()
                del fetch  # frees its storage

    # -- end

    def forget(self) -> None:
        """Forget the leaving and away buffers: no saved tensor is left that needs them."""
        self.leaving.clear()
        self._away.clear()

    def close(self) -> None:
        """Close the tier."""
        self.note_stall()
        if self._tier is not None:
            self._tier.close()
