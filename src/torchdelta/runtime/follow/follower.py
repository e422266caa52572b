"""Carries programs out: at each save and each unpack of a step it does what is due there.

[Note: decisions only]
Following decides when buffers leave and return. It uses the verbs of the reactive runtime, which ensure that nothing is
lost: a buffer that the program did not bring back in time is brought back when it is unpacked, and if the program
leaves too much on the device, `Room` evicts by its policy (counted as `num_unplanned`). A program that does not fit the
step therefore costs time, but never changes a bit.

If a step saves another tensor than the program expects, another program that agrees with the saves so far takes over
([Note: which program] in program.py), and buffers that should have left earlier in its schedule leave at once. If there
is none, the policy takes over, and buffers that have left come back when they are unpacked.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdelta.runtime.follow.program import Position, ProgramCache
from torchdelta.runtime.follow.returns import Returns
from torchdelta.runtime.follow.step_log import signature_of
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.state.buffer import Residence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.tape import Tape
    from torchdelta.runtime.follow.learning import Learning
    from torchdelta.runtime.follow.persistent_cursor import PersistentCursor
    from torchdelta.runtime.follow.program import Key, Program, Proof
    from torchdelta.runtime.follow.schedule import Due, Schedule
    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.state.buffer import Buffer, View

__all__ = ["EndedStep", "Follower"]

_logger = logging.getLogger("torchdelta")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """The latest step.

    Attributes:
        key: What it saved.
        first: The exact hash of its first save.
        start_bytes: The bytes in use at its first save, those of persistent tensors that are away included.
        program: The program that carried it out to its end; None if there was none, or it left the step.
        is_exact: Whether that program was made for these shapes.
        was_watched: Whether its backward ran under the recorder.
        had_abandoned: Whether other tensors were saved before, which had no backward: an evaluation.
        has_replaced: Whether the training has replaced persistent tensors that the program moves.
    """

    key: Key
    first: int
    start_bytes: int
    program: Program | None
    is_exact: bool
    was_watched: bool
    had_abandoned: bool
    has_replaced: bool = False


class Follower:
    """The position in the program that is being carried out. Mutable; one for each session.

    Args:
        restorer: Brings buffers back; knows the ledger, the room and the transfers.
    """

    def __init__(self, restorer: Restorer) -> None:
        self.restorer = restorer
        self.room = restorer.room
        self.ledger = restorer.ledger
        self.transfers = restorer.transfers
        self._returns = Returns(restorer)
        self.persistents: PersistentCursor | None = None  # where persistent tensors may leave
        self.is_on = False  # whether saves are counted: there are programs, or may be
        self.programs = ProgramCache(restorer.room.budget_bytes or 0)
        self.position = Position()
        self.ended: EndedStep | None = None
        self.num_followed_steps = 0
        self.num_diverged_steps = 0  # a program was begun and none carried the step out to its end
        self.reasons: Counter[str] = Counter()  # why
        self.latest_reason = ""
        self.on_first_save: Callable[[Buffer, View], None] | None = None
        self._running: Program | None = None  # what this step carries out
        self._is_exact = False
        self._was_watched = True
        self._had_abandoned = False
        self._why_left = ""
        self._due: dict[int, Due] = {}
        self._tape: Tape | None = None  # in a step of which a part is carried out there
        self._rest: Schedule | None = None  # what is not
        self.number = -1  # of the tensor that is being saved, in a step that is recorded in part
        self.learning: Learning | None = None  # while the outline of a step is learned
        self.before_begin: Callable[[], None] | None = None  # at the first save of a step
        self.on_begin: Callable[[Program, Buffer], None] | None = None  # the same, of one with a program
        self.on_abandon: Callable[[], None] | None = None  # where all saves of such a step are gone without a backward
        self._is_in_part = False  # whether the step was recorded in part, and saved all that its outline has
        self._is_blind = False  # whether the rest of the step's saves is not numbered
        self._saved: dict[int, weakref.ref[Buffer]] = {}  # by save
        self._swapped: list[weakref.ref[Buffer] | None] = []  # in the order of the program's copies out
        self._num_released = 0  # how many of them have been waited for

    # -- what a backward asks

    @property
    def is_following(self) -> bool:
        """Whether the running step is carried out by a program."""
        return self._running is not None

    @property
    def may_record_in_part(self) -> bool:
        """Whether the next step may be recorded in part."""
        return self.on_begin is not None

    @property
    def is_complete(self) -> bool:
        """Whether this step has saved all that the traced one saved, and nothing else."""
        return self._running is not None and self.position.num_saves == self._running.schedule.num_saves

    def may_run_unwatched(self, graph: int, start_bytes: int, leaving_bytes: int) -> bool:
        """Return whether a backward is known to fit: its program held the budget when the same one ran watched.

        Args:
            graph: What its growth depends on beside the step: its nodes, which leaves have gradients, and
                what its forward made.
            start_bytes: The bytes in use before it.
            leaving_bytes: Of these, bytes of buffers whose copies out are under way.
        """
        program, budget_bytes = self._running, self.room.budget_bytes
        proof = program.proofs.get((self.position.key, self._name_of(graph))) if program is not None else None
        if proof is None or budget_bytes is None:
            return False
        budget_bytes -= self.room.device.margin_bytes(budget_bytes)
        return proof.expected_peak_bytes(start_bytes, leaving_bytes) <= budget_bytes

    def on_unwatched(self) -> None:
        """Note that a backward of this step runs unwatched."""
        self._was_watched = False

    def measured(self, graph: int, proof: Proof) -> None:
        """Record what a watched backward has taken."""
        if self._running is not None:
            self._running.prove(self.position.key, self._name_of(graph), proof)

    def _name_of(self, graph: int) -> int:
        """Return what a backward is proved as: in a step that was recorded in part, other buffers are resident."""
        return hash((graph, self._is_in_part))

    def leaving_bytes(self) -> int:
        """Return the bytes of the buffers whose copies out are under way."""
        return sum(buffer.size_bytes for buffer in self.transfers.leaving)

    # -- a step

    def on_save(self, buffer: Buffer, view: View) -> int:
        """Number a save, and let leave what leaves there. Return the number; -1 if saves are not counted."""
        if not self.is_on or self.ledger.surveys or self._is_blind:
            return -1
        if self.number >= 0:
            self._saved[self.number] = weakref.ref(buffer)
            if self.transfers.leaving:
                self.transfers.reap()  # no op does that meanwhile
            self.evict_at(self.number)
            if self._tape is not None:
                self._tape.act(self.number, False)
            return self.number
        position = self.position
        save = position.num_saves
        if save == 0:
            if self.before_begin is not None:
                self.before_begin()
            self.room.usage.ask_counter()
            position.restart(self.room.usage.total_bytes + self._away_bytes())
            self._saved.clear()
        position.add(signature_of(buffer, view), buffer.size_bytes)
        self._saved[save] = weakref.ref(buffer)
        if self.learning is not None:
            self.learning.on_save(save, buffer)
        running = self._running
        if save == 0 or (running is not None and not running.agrees(position, exactly=self._is_exact)):
            if save == 0 and self.on_first_save is not None:
                self.on_first_save(buffer, view)
            self._choose(save)
            running = self._running
        if running is not None:
            self.evict_at(save)
            if self.persistents is not None:
                self.persistents.reach_save(save)
            if save == 0 and self._is_exact and self.on_begin is not None:
                self.on_begin(running, buffer)
        return save

    def before_unpack(self, save: int, buffer: Buffer) -> None:
        """Do what is due before a saved tensor of this buffer is returned."""
        transfers = self.transfers
        if transfers.leaving:
            transfers.reap()
        if self._buffer_at(save) is not buffer:
            return  # it is the save of an earlier graph
        self.do_due(save)
        if self._tape is not None:
            self._tape.act(save, True)

    def do_due(self, save: int) -> None:
        """Do what is due before a saved tensor is returned for the first time."""
        if self.persistents is not None:
            self.persistents.reach_unpack(save)
        due = self._due.pop(save, None)
        if due is None:
            return
        transfers = self.transfers
        for reference in self._swapped[self._num_released : due.num_released]:
            leaving = reference() if reference is not None else None
            while leaving is not None and leaving in transfers.leaving:
                transfers.finish_first()
        self._num_released = max(self._num_released, due.num_released)
        for buffer_id in due.fetches:
            self._returns.fetch(self._find(buffer_id))
        for group in due.replays:
            self._returns.replay([self._find(buffer_id) for buffer_id in group])

    def on_step_end(self) -> None:
        """Note what the step was, and begin the next one at its first save."""
        program = self._running if self.is_complete else None
        has_replaced = False
        if program is not None:
            self.num_followed_steps += 1
            program.num_followed += 1
            self.programs.use(program)
            if self.persistents is not None:
                has_replaced = not self.persistents.end_step()
                if has_replaced:
                    self.programs.remove(program)  # it is traced and planned anew
                program.settle()  # recording is never reduced, so its times count from now on
        elif self._running is not None:
            self.leave(f"it ended early: {self.position.num_saves} saves of {self._running.schedule.num_saves}")
        if self._why_left:
            self.num_diverged_steps += 1
            self.latest_reason = self._why_left
            self.reasons[self._why_left.partition(":")[0]] += 1
        self.transfers.forget_unsaved()
        self.ended = EndedStep(
            key=self.position.key,
            first=self.position.first,
            start_bytes=self.position.start_bytes,
            program=program,
            is_exact=self._is_exact,
            was_watched=self._was_watched,
            had_abandoned=self._had_abandoned,
            has_replaced=has_replaced,
        )
        self.restart()

    def abandon(self) -> bool:
        """Forget the saves so far, which had no backward. Return whether the step before had such saves as well."""
        self.room.unplanned_bytes = 0  # the next step is not to blame
        if self.on_abandon is not None:
            self.on_abandon()
        self.restart()
        self._had_abandoned = True
        return self.ended is not None and self.ended.had_abandoned

    def restart(self) -> None:
        """Forget the saves so far."""
        self._stop()
        self._why_left = ""
        self._had_abandoned = False
        self._was_watched = True
        self._is_blind = self._is_in_part = False
        self._saved.clear()
        self.position.restart(0)

    def leave(self, why: str) -> None:
        """Stop following for the rest of this step."""
        if self._running is not None:
            self._why_left = why
            _logger.debug("the step is not followed any more: %s", why)
        if self.persistents is not None:
            self.persistents.stop()
        self._stop()

    def refuse(self) -> None:
        """Stop following a step that the budget cannot hold, and watch its backward from now on."""
        if self._running is not None:
            self._running.disprove(self.position.key)
        self.leave("the step does not fit the budget")

    # -- a step that is recorded in part

    def use_tape(self, tape: Tape, rest: Schedule) -> None:
        """Carry out only the rest of the program: the tape does the other part."""
        self._tape, self._rest = tape, rest
        self._due = dict(rest.due)

    def act(self, save: int, is_unpack: bool) -> None:
        """Do what is due at a saved tensor that is on the tape."""
        if self.transfers.leaving:
            self.transfers.reap()
        if is_unpack:
            self.do_due(save)
        else:
            self.evict_at(save)

    def evict_at(self, save: int) -> None:
        """Let leave what leaves at a save."""
        if self._running is not None:
            self._evict(self._rest if self._rest is not None else self._running.schedule, save)

    def complete_outlined(self) -> None:
        """Note that the step has saved all that its outline has."""
        if self._running is not None:
            self.position.complete(self._running.key)
            self._is_in_part = True

    def leave_outlined(self, why: str) -> None:
        """Stop following for the rest of this step, and do not number its saves: the earlier ones were not all seen."""
        self.leave(why)
        self._is_blind = True

    # -- which program

    def _choose(self, save: int) -> None:
        """Begin a program at the first save, or go over to another one."""
        chosen = self.programs.choose(self.position)
        if chosen is None:
            self.leave(f"it saved other tensors: from save {save} on")
            return
        program, self._is_exact = chosen
        self._running = program
        self._due = dict(program.schedule.due)
        self._swapped.clear()
        self._num_released = 0
        self.room.is_followed = True
        for earlier in range(save):
            self._evict(program.schedule, earlier)
        if self.persistents is not None:
            self.persistents.follow(program.schedule.persistent, save)

    def _stop(self) -> None:
        self._running = self._tape = self._rest = None
        self._due = {}
        self.room.is_followed = False

    # -- what is due

    def _evict(self, schedule: Schedule, save: int) -> None:
        for buffer_id, action in schedule.evictions.get(save, ()):
            leaving = self._find(buffer_id)
            if action is Action.SWAP:
                self._swapped.append(weakref.ref(leaving) if leaving is not None else None)
            if leaving is None or leaving.residence is Residence.LEAVING or leaving.stays:
                continue
            if leaving.record is None or leaving.record.emptied is None:
                self.room.evict(leaving, action, lazily=True)

    def _find(self, buffer_id: int) -> Buffer | None:
        """Return the live buffer that a buffer of the trace stands for, in its latest content."""
        assert self._running is not None
        save = self._running.schedule.first_saves[buffer_id]
        buffer = self._buffer_at(save)
        while buffer is not None and buffer.successor is not None:
            buffer = buffer.successor
        return buffer

    @property
    def has_evicted(self) -> bool:
        """Whether anything has left so far."""
        persistents = self.room.persistents
        has_emptied = persistents is not None and persistents.emptying.num_emptied > 0
        return has_emptied or self.room.counters.num_evictions > 0

    def _away_bytes(self) -> int:
        """Return the bytes of the persistent tensors that are away: where a step begins, they count as here."""
        persistents = self.room.persistents
        return persistents.emptying.away_bytes if persistents is not None else 0

    def _buffer_at(self, save: int) -> Buffer | None:
        reference = self._saved.get(save)
        return reference() if reference is not None else None
