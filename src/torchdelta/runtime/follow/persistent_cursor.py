"""Where in a plan's step the running step is, for persistent tensors: asks for the moves that are due."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from torchdelta.runtime.memory.use_order import UseSequence

if TYPE_CHECKING:
    from torchdelta.runtime.follow.persistent_schedule import PersistentSchedule
    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.trace.model import Phase

__all__ = ["PersistentCursor"]


class PersistentCursor:
    """The position in the schedule that is followed. Mutable; one for each session whose persistent tensors may leave.

    Between the end of a followed step and the next first save, the next step is assumed to follow the same schedule.

    Args:
        persistents: Moves them.
        steps: Knows the phase of the running step.
    """

    def __init__(self, persistents: Persistents, steps: StepTracker) -> None:
        self._persistents = persistents
        self._planned = persistents.planned
        self._steps = steps
        self._schedule: PersistentSchedule | None = None
        self._sequence: UseSequence[tuple[int, Phase]] = UseSequence()
        self._num_done = 0  # of the schedule's moves
        self._op = 0  # all that was due before this op was asked for
        self._counted_from = (0, 0)  # an op of the schedule, and how many recorded ops had begun before it
        self._is_between_steps = False  # whether a followed step has ended, and the next one has not saved anything yet

    def follow(self, schedule: PersistentSchedule | None, save: int) -> None:
        """Follow a schedule from a save on; None: that of a plan that leaves persistent tensors alone."""
        if schedule is None:
            self.stop()
            return
        op = schedule.pack_ops[save]
        if schedule is not self._schedule or self._op > op:  # in the last case, an evaluation has used the tensors
            if schedule is not self._schedule:
                self._planned.forget()
            self._schedule = schedule
            self._sequence = UseSequence(schedule.uses)
            self._sequence.now = bisect_left(schedule.use_ops, op)
            self._num_done = self._op = 0
            self._planned.is_on = self._persistents.is_active = True
            self._planned.on_moment = self._on_moment
            self._persistents.candidates.on_use = self._on_use
        self._is_between_steps = False
        self._reach(op)
        self._persistents.move_planned()

    def stop(self) -> None:
        """Follow no schedule from now on."""
        if self._schedule is not None:
            self._schedule = None
            self._planned.is_on = False
            self._planned.on_moment = None
            self._planned.forget()
            self._persistents.candidates.on_use = None

    def end_step(self) -> bool:
        """Ask for the remaining moves. The next step is assumed to follow the same schedule.

        Returns:
            Whether the schedule moves tensors that are still there: the program may have replaced some.
        """
        if self._schedule is not None:
            self._planned.end_step()
            if not self._planned.knows(self._schedule.lasting):
                self.stop()
                return False
            self._is_between_steps = True
            left, freed = self._schedule.moves[self._num_done :], self._schedule.freed
            # In the next step, the key of a gradient that was freed is that of another one.
            self._planned.ask((move, key) for _, move, key in left if key not in freed)
            self._sequence.now = self._num_done = self._op = 0
            self._counted_from = (0, self._steps.counters.num_ops)
        return True

    def reach_save(self, save: int) -> None:
        """Do what is due at a save."""
        if self._schedule is not None and self._reach(self._schedule.pack_ops[save]):
            self._persistents.move_planned()

    def reach_unpack(self, save: int) -> None:
        """Do what is due before the first unpack of a save."""
        if self._schedule is not None and self._reach(self._schedule.unpack_ops.get(save, 0)):
            self._persistents.move_planned()

    def _on_use(self, key: int) -> None:
        """Note a use; `Persistents` moves what is due then."""
        schedule, sequence = self._schedule, self._sequence
        before = sequence.now
        if schedule is None or not sequence.use((key, self._steps.phase)) or sequence.now == before:
            return  # in the last case, the traced step has noted the first of several uses in a row
        if self._is_between_steps and sequence.now < before:
            self.stop()  # an evaluation: what it needs next is read ahead without a plan
            return
        self._reach(schedule.use_ops[sequence.now - 1])

    def _on_moment(self) -> None:
        """Ask for what is due before the op that is about to run."""
        schedule, now = self._schedule, self._sequence.now
        if schedule is not None:
            next_op = schedule.use_ops[now] if now < len(schedule.use_ops) else schedule.num_ops
            op, num_ended = self._counted_from
            self._ask_until(min(op + self._steps.counters.num_ops - num_ended, next_op))

    def _reach(self, op: int) -> bool:
        """Note that the step has come to an op, and ask for what is due before it. Return whether it has advanced."""
        self._counted_from = (op, self._steps.counters.num_ops)
        return self._ask_until(op)

    def _ask_until(self, op: int) -> bool:
        schedule = self._schedule
        if schedule is None or op <= self._op:
            return False
        self._op = op
        first, moves = self._num_done, schedule.moves
        while self._num_done < len(moves) and moves[self._num_done][0] <= op:
            self._num_done += 1
        self._planned.ask((move, key) for _, move, key in moves[first : self._num_done])
        return True
