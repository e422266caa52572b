"""What a plan does with persistent tensors: parameters, gradients and optimizer states.

[Note: moments of persistent tensors]
A plan's moments are ops of the trace. A followed step knows how far it has come at each save, at the first unpack of
each save, and at each use of a persistent tensor: the traced step has noted how many ops ran before it. From there on
it counts the recorded ops, but never beyond the next use: a trace may have ops that are not recorded, and a step may
run ops that the traced one did not. Moves that are due by then are done. A move is early only if the step runs ops that
the traced one did not.

A plan is that of a step which repeats. What is away over its end returns in the next step: the moments that a plan
counts beyond the end of the step are reached there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdelta.runtime.memory.planned_moves import Move

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.plan.model import Absence, Plan
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Phase

__all__ = ["PersistentSchedule", "is_carried_out", "make_persistent_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentSchedule:
    """What a plan does with persistent tensors, as a step carries it out. Immutable. A key identifies a tensor.

    Attributes:
        uses: (key, phase) of each use, in the order of the traced step.
        use_ops: By use: how many ops came before it.
        pack_ops: By save: how many ops came before it.
        unpack_ops: By save: how many ops came before its first unpack.
        moves: (op, move, key): due before this op, in order.
        num_ops: Ops of the step.
        lasting: The keys of the tensors that are moved and that outlive a step: all but gradients.
        freed: The keys of gradients that depart after the optimizer has read them, and that the program then frees.
    """

    uses: tuple[tuple[int, Phase], ...]
    use_ops: tuple[int, ...]
    pack_ops: tuple[int, ...]
    unpack_ops: dict[int, int]
    moves: tuple[tuple[int, Move, int], ...]
    num_ops: int
    lasting: frozenset[int]
    freed: frozenset[int] = frozenset()


def make_persistent_schedule(plan: Plan, log: StepLog) -> PersistentSchedule | None:
    """Return what a plan does with persistent tensors; None if nothing.

    Args:
        plan: A valid plan of the traced step.
        log: The uses of that step.
    """
    absences = [absence for absence in plan.absences if is_carried_out(absence, log)]
    if not absences and not log.departures:
        return None
    unpack_ops: dict[int, int] = {}
    for save, op in log.unpacks:
        unpack_ops.setdefault(save, op)
    moves = [move for absence in absences for move in _moves(absence, log)]
    for each in log.departures:
        moves += [(each.copy_op, Move.COPY_OUT, 0, each.key), (each.leave_op, Move.LEAVE, 0, each.key)]
    moves.sort()
    return PersistentSchedule(
        uses=tuple((key, phase) for key, phase, _ in log.uses),
        use_ops=tuple(op for _, _, op in log.uses),
        pack_ops=log.pack_ops,
        unpack_ops=unpack_ops,
        moves=tuple((op, move, key) for op, move, _, key in moves),
        num_ops=log.num_ops,
        lasting=frozenset(key for _, _, _, key in moves if key >= 0),
        freed=frozenset(each.key for each in log.departures)
        & {key for key, phase, _ in log.uses if phase == "optimizer"},
    )


def is_carried_out(absence: Absence, log: StepLog) -> bool:
    """Return whether an absence is a swap of a persistent tensor, in a step whose uses were logged."""
    return absence.action == "swap" and absence.buffer_id in log.persistents and bool(log.uses)


def _moves(absence: Absence, log: StepLog) -> Iterable[tuple[int, Move, int, int]]:
    """Yield the moves of an absence, with their ranks among the moves that are due at the same op."""
    if absence.leave_op >= absence.return_op:
        return  # its memory is never free
    key, num_ops = log.persistents[absence.buffer_id], log.num_ops
    yield (absence.queued_op + 1) % num_ops, Move.COPY_OUT, absence.last_use_op, key
    yield absence.leave_op % num_ops, Move.LEAVE, absence.last_use_op, key
    yield absence.return_op % num_ops, Move.COPY_IN, absence.return_rank, key
