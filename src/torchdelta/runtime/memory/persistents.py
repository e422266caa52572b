"""Evicts persistent tensors: parameters, gradients and optimizer states that no op is reading.

[Note: emptied in place]
The program holds these tensors, so freeing their memory has to leave them intact. The storage is copied to the tier and
then resized to 0 bytes. Every alias of it stays valid, and sees the content again once the storage has its size back
and is read from the tier. Reading an alias in between would crash the process. So

- every op of the thread brings its arguments back first (record/recorder.py), and they stay for its duration;
- in backward, where the recorder is off between nodes, gradients that the engine is about to accumulate into are
  brought back after the node before, and Python code brings its arguments back (record/gap_reads.py); saved tensors
  are brought back when they are unpacked, and stay until their node ends;
- the methods by which a program reaches memory without an op are patched (record/readers.py). Where they give it an
  address that may outlive the call, the tensor stays from then on;
- a storage never leaves if the program holds its Python object, or if something outside of torch shares its memory. Nor
  does that of a gradient if another tensor shares it, because the engine may be about to read that tensor;
- reads by other threads are not seen. Nothing leaves while torch.distributed is in use.

A storage that was only read since it came back has a valid copy (`StorageRecord.spare`), and leaves without a transfer.
Some writes are not ops (the engine's accumulation, hooks). They invalidate the copy, but are looked for only if
something is away now or was in the last step, or a plan is followed. So after a step without a plan in which nothing
left, all these copies are given up.

From the second step on, transfers run beside the compute: see read_ahead.py, and planned_moves.py where a plan is
followed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from torchdelta.runtime.memory.candidates import Candidates, FindsPersistents
from torchdelta.runtime.memory.compiled_reads import CompiledReads
from torchdelta.runtime.memory.emptying import Emptying
from torchdelta.runtime.memory.in_use import InUse, arguments_in
from torchdelta.runtime.memory.planned_moves import PlannedMoves
from torchdelta.runtime.memory.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.persistent import Persistent
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["BRINGING", "Persistents", "RoomMaker"]

BRINGING: Final = "bringing back parameters, gradients or optimizer states"
"""The reason of a request for room for tensors that come back."""

# How many pieces are read ahead, and are kept ready to leave.
_PIECES_AHEAD = 3


class RoomMaker(Protocol):
    """Makes room under the budget: `room.Room`."""

    device: Device

    def make(self, size_bytes: int, why: str) -> None:
        """Make sure that bytes fit."""

    def lacks(self, size_bytes: int) -> int:
        """Return how many bytes have to be evicted for bytes to fit."""
        ...


class Persistents:
    """Evicts persistent tensors, and brings them back.

    Args:
        ledger: The ledger.
        transfers: Copies storages to the tier and back.
        steps: The position in the training step.
        owners: Finds the persistent tensors.
    """

    def __init__(
        self,
        ledger: Ledger,
        transfers: Transfers,
        steps: StepTracker,
        owners: FindsPersistents,
    ) -> None:
        self.ledger = ledger
        self.make: Callable[[int, str], None] = _make_nothing  # of the room that uses this
        self.piece_bytes = sys.maxsize  # see [Note: lists in pieces]
        self.is_open = True  # whether anything may leave
        self.is_active = False  # whether anything has left in this step or the last, or a plan is followed
        self.in_use = InUse(ledger)
        self.emptying = Emptying(ledger, transfers)
        self.candidates = Candidates(ledger, steps, self.in_use, owners)
        self._ahead = ReadAhead(self.candidates, self.emptying, self.in_use)
        self._exclusive: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._steps = steps
        self.compiled = CompiledReads(self.candidates, self.emptying, self._bring)
        self.planned = PlannedMoves(self.candidates, self.emptying, self.in_use)
        self.num_copying = 0  # calls of torch that read raw memory, but pass no address on
        self.is_describing: Callable[[], bool] = bool  # returns whether torch makes fake tensors now
        self._budget_bytes: float = math.inf
        self._step = 0
        self._num_before = 0  # `num_emptied` when the step began

    def attach(self, budget_bytes: int | None, piece_bytes: int, room: RoomMaker) -> None:
        """Connect to the room that uses this.

        Args:
            budget_bytes: The budget.
            piece_bytes: The most that a piece of a list takes.
            room: Makes room.
        """
        self.make = room.make
        if budget_bytes is not None:
            self._budget_bytes = budget_bytes
            self.piece_bytes = piece_bytes
            self._ahead.window_bytes = _PIECES_AHEAD * piece_bytes
            self._ahead.lacks = self.planned.lacks = room.lacks
            self._exclusive = room.device.exclusive

    # -- what must be here

    def begin(self, *arguments: Any, may_write: bool = False) -> None:
        """Bring back the tensors among an op's arguments, in lists and dicts too. They stay until `end`.

        `may_write`: the op may write them without the recorder seeing that.
        """
        self.in_use.begin(arguments)
        if self.is_active or self.ledger.observing.observer.wants_uses:
            try:
                self.bring(arguments_in(arguments), may_write=may_write)
            except BaseException:
                self.in_use.end()
                raise

    def end(self) -> None:
        """The op that began last has ended."""
        self.in_use.end()

    def bring(self, tensors: Iterable[torch.Tensor], *, may_write: bool = False) -> None:
        """Bring tensors back.

        Args:
            tensors: What is about to be read.
            may_write: Whether it may be written without the recorder seeing that.
        """
        if self._steps.num_steps != self._step:
            self._on_step()
        if self.planned.is_on or self.ledger.observing.observer.wants_uses:
            self.candidates.search_once_a_phase()
        used = list(self.in_use.records(tensors))
        for record in used:
            self.candidates.use(record)
            if may_write and not self.ledger.surveys:  # in a survey, recorded ops write no real tensor
                self.emptying.spoil(record)
        if self.planned.on_moment is not None and not may_write:
            self.planned.on_moment()
            self.move_planned()
        missing = list(dict.fromkeys(record for record in used if record.emptied is not None))
        if missing:
            self._bring(missing)
            if may_write:
                for record in missing:
                    record.spare = None
        # Not where unrecorded code runs next: room was made for what that allocates.
        if self.is_active and not self.planned.is_on and not may_write:
            self._look_ahead()

    def move_planned(self) -> None:
        """Start the transfers that are due by the plan that is followed."""
        if self.planned.has_due and self._may_move():
            with self._exclusive():
                self.planned.move()

    def _look_ahead(self) -> None:
        """Move beside the compute what the next uses need."""
        if self._ahead.is_due and self._may_move():
            if self._steps.is_in_optimizer:
                self.candidates.search_once_a_phase()
            with self._exclusive():
                self._ahead.look()

    def _may_move(self) -> bool:
        """Return whether tensors may leave or come back that nothing asks for."""
        return self.is_open and not self.ledger.surveys and not self.compiled.is_running and not self.candidates.is_lent

    def bring_record(self, record: StorageRecord) -> None:
        """Bring a storage back that a replay or an unpack reads, and let it stay for the rest of that."""
        self.candidates.use(record)
        self._bring([record])

    def _bring(self, missing: list[StorageRecord]) -> None:
        size_bytes = sum(
            content.size_bytes
            for record in missing
            if (content := record.emptied) is not None and not record.size_bytes
        )
        self.in_use.begin([storage for record in missing if (storage := record.storage()) is not None])
        try:
            if size_bytes:
                self.make(size_bytes, BRINGING)
            for record in missing:
                if record.emptied is not None:
                    self.emptying.refill(record)
        finally:
            self.in_use.end()

    def bring_all(self, room_bytes: float = 0) -> list[StorageRecord]:
        """Bring everything back: up to `room_bytes` into memory, the rest as mappings where that is possible.

        See [Note: mapped back] in emptying.py.

        Returns:
            What was away.

        Raises:
            TierIOError: Something cannot be read. All else is here.
            RuntimeError: The device has no memory for something. All else is here.
        """
        return self.emptying.refill_all(room_bytes)

    def empty_again(self, brought: list[StorageRecord]) -> None:
        """Empty what `bring_all` has returned for a survey, as far as it may leave and was not written since."""
        locked = self.in_use.addresses()
        for record in brought:
            known = self.candidates.known.get(record.id)
            if known is not None and record.address not in locked and self.candidates.may_leave(known):
                self.emptying.empty_again(record)
        self.is_active |= self.ledger.num_emptied > 0

    def close(self) -> None:
        """Bring everything back: the scope ends. Nothing leaves any more. What does not fit the budget is mapped.

        Raises:
            TierIOError: Something cannot be read. It holds NaN from now on.
            RuntimeError: The device has no memory for something. It stays empty.
        """
        self.is_open = self.is_active = False
        self.ledger.usage.ask_counter(fresh=True)
        try:
            self.bring_all(self._budget_bytes - self.ledger.usage.total_bytes)
        except BaseException:
            for record in list(self.ledger.records.values()):
                if record.emptied is not None:
                    self.emptying.refill_or_lose(record)
            raise
        finally:
            self.emptying.spoil_all()

    # -- what stays

    @contextlib.contextmanager
    def all_here(self) -> Generator[None]:
        """Let nothing leave while code runs for which nothing would be brought back."""
        was_open, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = was_open

    def lock(self, tensors: Iterable[torch.Tensor], *, may_write: bool = False) -> None:
        """Bring tensors back that unrecorded code is about to read. In backward they stay until `in_use.unlock`."""
        found = list(tensors)
        self.in_use.lock(found)
        if self.is_active:
            self.in_use.begin(found)
            try:
                self.bring(found, may_write=may_write)
            finally:
                self.in_use.end()

    def begin_raw(self, things: Iterable[Any]) -> None:
        """Bring back tensors or storages whose memory is about to be read without an op, until `end`."""
        found = list(things)
        records = list(self.in_use.records(found))
        self.in_use.begin(found)
        try:
            for record in records:
                self.emptying.spoil(record)
                if record.emptied is not None:
                    self.bring_record(record)
                record.spare = None
        except BaseException:
            self.in_use.end()
            raise

    def export(self, things: Iterable[Any]) -> None:
        """Something outside of torch is given the address of tensors or storages: they stay from now on."""
        found = list(things)
        for thing in found:
            if isinstance(thing, torch.Tensor) and thing.device == self.ledger.device:
                self.ledger.know_inner(thing)
        self.begin_raw(found)
        for record in self.in_use.records(found):
            record.is_exported = True
        self.end()

    def keep(self, *arguments: Any) -> None:
        """Let the tensors among an op's arguments, which are here, stay from now on.

        A node that runs without the recorder may read them, and the runtime does not see that where hooks of others
        have saved them, such as a checkpoint's.
        """
        for record in self.in_use.records(arguments_in(arguments)):
            record.is_exported = True

    # -- evictions

    def evict_idle(self, target_bytes: int) -> None:
        """Evict tensors that are not needed soon and leave without a transfer, until `target_bytes` live."""
        if self._steps.num_steps != self._step:
            self._on_step()
        if self.is_active and self._may_move():
            self._ahead.release_idle(self.ledger.usage.live_bytes - target_bytes)

    def finish_leaving(self, target_bytes: int) -> None:
        """Wait for copies out of a plan, and let their tensors leave, until `target_bytes` live."""
        if self._may_move():
            self.planned.finish_leaving(target_bytes, self.ledger.usage)

    def evict(self, target_bytes: int) -> None:
        """Evict tensors, those first that are needed last, until no more than `target_bytes` live."""
        if not self.is_open or self.ledger.surveys:
            return
        if self._steps.num_steps != self._step:
            self._on_step()
        candidates, usage = self.candidates, self.ledger.usage
        for attempt in range(3):
            if attempt == 2 and candidates.was_searched:
                break
            if attempt or not candidates.known or self.compiled.is_running:
                candidates.search(is_thorough=attempt == 2)
            else:
                candidates.search_once_a_phase()
            locked = self.in_use.addresses()
            ranking, only_spares = candidates.ranking(), False
            while usage.live_bytes > target_bytes:
                leaving = self._choose(ranking, usage.live_bytes - target_bytes, locked, only_spares=only_spares)
                if not leaving:
                    break
                self.is_active = True
                candidates.note_leaving(leaving)
                only_spares |= not self.emptying.empty(leaving)  # the tier took no copy of some
            if usage.live_bytes <= target_bytes:
                return
        self._cancel_refills(target_bytes)

    def _choose(
        self, ranking: list[Persistent], needed_bytes: int, locked: set[int], *, only_spares: bool
    ) -> list[StorageRecord]:
        """Take tensors from the end of the ranking, until they are enough. A tensor with a spare needs no slot."""
        chosen: list[StorageRecord] = []
        while ranking and needed_bytes > 0:
            known = ranking.pop()
            record = known.record
            if record.address in locked or record.emptied is not None or self.compiled.may_read(known):
                continue
            if self.emptying.has_spare(record):
                self.emptying.finish_spare(record)  # the transfer holds the storage
            if only_spares and not self.emptying.has_spare(record):
                continue
            if self.candidates.may_leave(known):
                chosen.append(record)
                needed_bytes -= record.size_bytes
        return chosen

    def _cancel_refills(self, target_bytes: int) -> None:
        """Give up what is read ahead, until no more than `target_bytes` live."""
        locked = self.in_use.addresses()
        for record in self.emptying.emptied.values():
            if self.ledger.usage.live_bytes <= target_bytes:
                return
            if record.address not in locked:
                self.emptying.cancel_refill(record)

    def _on_step(self) -> None:
        """Notice that a step has ended."""
        self._step = self._steps.num_steps
        was_active = self.is_active
        has_left = self.ledger.num_emptied > 0 or self.emptying.num_emptied > self._num_before
        self.is_active = has_left or self.planned.is_on
        if was_active and not self.is_active:
            # From here on nothing shows what the engine adds to a gradient.
            self.emptying.spoil_all()
        self.emptying.prune()
        self._num_before = self.emptying.num_emptied
        self.candidates.end_step()


def _make_nothing(size_bytes: int, why: str) -> None:
    del size_bytes, why
