"""Turns a plan into lists of what is due at each save and each unpack of a step, so that a step searches nothing.

[Note: moments]
A plan's moments are ops of the trace. For saved tensors, a followed step does not count ops: it reaches a moment at the
first save or unpack that stood after it in the traced step, hence never earlier than planned where memory is taken
(fetches, replays), and never later where a copy out starts. What is due at an unpack is done before that tensor is
returned.

A dropped buffer is released at each of its saves, not only at the last one. This frees nothing too early: the program
holds the storage as long as it uses it, so a buffer that is saved again later is still resident then.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from torchdelta.runtime.follow.persistent_schedule import is_carried_out, make_persistent_schedule
from torchdelta.runtime.follow.step_log import next_exact_hash, next_shape_free_hash
from torchdelta.runtime.policies.base import Action

if TYPE_CHECKING:
    from torchdelta.plan.model import Absence, Plan
    from torchdelta.runtime.follow.persistent_schedule import PersistentSchedule
    from torchdelta.runtime.follow.step_log import StepLog

__all__ = ["Due", "Schedule", "make_schedule"]


@dataclass(slots=True)
class Due:
    """What is due before a saved tensor is returned in backward. Buffers are named by their ids in the trace.

    Attributes:
        num_released: So many of the step's swapped buffers must have left by now, in the order of their copies.
        fetches: Swapped buffers whose copies in begin, in this order.
        replays: Groups of dropped buffers, each brought back by one chain of replays.
    """

    num_released: int = 0
    fetches: list[int] = field(default_factory=list)
    replays: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A program as a step carries it out. Immutable.

    Attributes:
        exact_hashes: By save: the exact hash of all saves up to it (`step_log.py`).
        shape_free_hashes: By save: the same but for the shapes.
        saved_bytes: By save: bytes of the storages of all saves up to it, one that is saved twice counted twice.
        first_saves: By buffer that an action refers to: its first save.
        evictions: By save: what leaves there.
        due: By save: what is due when it is unpacked for the first time.
        planned_saves: Those of buffers that an action refers to, those in `evictions`, and those in `due`.
        persistent: What the plan does with parameters, gradients and optimizer states; None: nothing, or they may not
            leave.
        num_not_carried_out: Absences of the plan that have no moment here, because their buffer is neither saved nor
            persistent, or because they do not lead from forward to backward.
    """

    exact_hashes: tuple[int, ...]
    shape_free_hashes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    first_saves: dict[int, int]
    evictions: dict[int, tuple[tuple[int, Action], ...]]
    due: dict[int, Due]
    planned_saves: frozenset[int] = frozenset()
    persistent: PersistentSchedule | None = None
    num_not_carried_out: int = 0

    @property
    def swapped(self) -> frozenset[int]:
        """The ids of the buffers that leave by being swapped out."""
        return frozenset(
            buffer_id for actions in self.evictions.values() for buffer_id, how in actions if how is Action.SWAP
        )

    @property
    def num_saves(self) -> int:
        """Saves of the whole step."""
        return len(self.exact_hashes)


def make_schedule(plan: Plan, log: StepLog) -> Schedule:
    """Return the schedule that carries a plan out.

    Args:
        plan: A valid plan of the traced step.
        log: The saves of that step.
    """
    saves: dict[int, list[int]] = {}
    for save, buffer_id in enumerate(log.buffer_ids):
        saves.setdefault(buffer_id, []).append(save)
    first_unpacks: dict[int, int] = {}  # by save: position among the unpacks
    for position, (save, _) in enumerate(log.unpacks):
        first_unpacks.setdefault(save, position)
    maker = _Maker(log, saves, first_unpacks)
    end_of_forward = log.unpacks[0][1] if log.unpacks else 0
    absences = [
        a
        for a in plan.absences
        if a.buffer_id in saves and a.last_use_op < end_of_forward <= a.next_use_op and not is_carried_out(a, log)
    ]
    maker.add_drops([a for a in absences if a.action == "recompute"])
    maker.add_swaps([a for a in absences if a.action == "swap"])
    all_due = {log.unpacks[position][0]: due for position, due in maker.due.items()}
    planned_saves = frozenset(all_due).union(maker.evictions, *(saves[absence.buffer_id] for absence in absences))
    return Schedule(
        exact_hashes=tuple(accumulate(log.signatures, next_exact_hash, initial=0))[1:],
        shape_free_hashes=tuple(accumulate(log.signatures, next_shape_free_hash, initial=0))[1:],
        saved_bytes=tuple(accumulate(log.sizes_bytes)),
        first_saves={a.buffer_id: saves[a.buffer_id][0] for a in absences},
        evictions={save: tuple(actions) for save, actions in maker.evictions.items()},
        due=all_due,
        planned_saves=planned_saves,
        persistent=make_persistent_schedule(plan, log),
        num_not_carried_out=len(plan.absences)
        - len(absences)
        - sum(is_carried_out(absence, log) for absence in plan.absences),
    )


class _Maker:
    """Collects what is due. Positions are those of first unpacks among all unpacks."""

    def __init__(self, log: StepLog, saves: dict[int, list[int]], first_unpacks: dict[int, int]) -> None:
        self.log = log
        self.saves = saves
        self.first_unpacks = first_unpacks
        self.positions = sorted(first_unpacks.values())
        self.ops = [log.unpacks[position][1] for position in self.positions]  # rising, as backward is traced
        self.evictions: dict[int, list[tuple[int, Action]]] = {}
        self.due: dict[int, Due] = {}

    def add_drops(self, absences: list[Absence]) -> None:
        """Let buffers go at their saves; bring each group that returns before the same op back together."""
        groups: dict[int, list[int]] = {}
        for absence in absences:
            for save in self.saves[absence.buffer_id]:
                self.evictions.setdefault(save, []).append((absence.buffer_id, Action.RECOMPUTE))
            groups.setdefault(absence.return_op, []).append(absence.buffer_id)
        for return_op, buffer_ids in sorted(groups.items()):
            position = min([self._position_after(return_op), *map(self._first_unpack, buffer_ids)])
            if position < len(self.log.unpacks):
                self._due(position).replays.append(tuple(buffer_ids))

    def add_swaps(self, absences: list[Absence]) -> None:
        """Start copies out at saves and copies in at unpacks, in the order that the plan gives."""
        starts: list[tuple[int, int]] = []  # (save, leave_op) in the order of the copies
        for absence in sorted(absences, key=lambda a: (a.queued_op, a.last_use_op, a.buffer_id)):
            own = self.saves[absence.buffer_id][-1]
            save = max(own, bisect_left(self.log.pack_ops, absence.queued_op)) if absence.out_op is not None else own
            save = min(save, len(self.log.pack_ops) - 1)
            self.evictions.setdefault(save, []).append((absence.buffer_id, Action.SWAP))
            starts.append((save, absence.leave_op))
        for absence in sorted(absences, key=lambda a: (a.return_op, a.return_rank, a.last_use_op, a.buffer_id)):
            position = min(self._position_after(absence.return_op), self._first_unpack(absence.buffer_id))
            if position < len(self.log.unpacks):
                self._due(position).fetches.append(absence.buffer_id)
        self._set_released([leave_op for _, leave_op in sorted(starts, key=lambda start: start[0])])

    def _set_released(self, leave_ops: list[int]) -> None:
        """At every unpack, let the copies out have ended that the plan waits for before the next one."""
        num_released = 0
        for position, next_op in zip(self.positions, [*self.ops[1:], float("inf")], strict=True):
            earlier = num_released
            while num_released < len(leave_ops) and leave_ops[num_released] <= next_op:
                num_released += 1
            if num_released > earlier:
                self._due(position).num_released = num_released

    def _position_after(self, op: int) -> int:
        """Return the position of the first unpack before which all ops up to, and without, `op` had run."""
        index = bisect_left(self.ops, op)
        return self.positions[index] if index < len(self.positions) else len(self.log.unpacks)

    def _first_unpack(self, buffer_id: int) -> int:
        """Return the position of the first unpack of any save of a buffer."""
        never = len(self.log.unpacks)
        return min(self.first_unpacks.get(save, never) for save in self.saves[buffer_id])

    def _due(self, position: int) -> Due:
        return self.due.setdefault(position, Due())
