"""Lanes: the part of a program that is carried out on the native tape.

[Note: which part goes to the tape]
A step that is recorded in part (outline.py) records, drops and replays by the same lists every time, so this can be
done without Python (native/tape.cpp). The tape and Python each know only what they have recorded themselves: a tensor
that the other one drops is for them like a tensor from before the scope, which they keep in memory. So buffers that
replays connect stay together: if the replay of one reads another one that leaves as well, both are on the tape or both
are in Python. Python takes all groups in which

* a buffer is swapped,
* an op writes to other tensors than its first argument, or is not torch's own,
* an op ran under other numeric settings than the first one,
* a buffer is the first saved one of the step, or was made before it by an op that is replayed.

Whatever else differs from the lane in a step, the tape hands all over to Python (runtime/record/native_lane.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdelta.native.saved_hooks import OnTape
from torchdelta.runtime.follow.schedule import Due

if TYPE_CHECKING:
    from torchdelta.native.gate import Recorded
    from torchdelta.runtime.follow.schedule import Schedule

__all__ = ["Lane", "LearnedOp", "make_lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedOp:
    """An op that was recorded in Python while the outline was learned. Buffers are named by their ids.

    Attributes:
        reads: The buffers that it reads.
        makes: The buffers that it makes.
        on_tape: How the tape records it; 0 if it cannot.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    on_tape: Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What the tape does in a step. Saved tensors are named by their numbers.

    Attributes:
        ops: The positions of the ops that it records.
        drops: By saved tensor: what is dropped there, by its first saved tensor.
        replays: By saved tensor: what is replayed before it is returned, in groups.
        saves: What happens to each saved tensor that has a number.
        rest: What Python does.
    """

    ops: frozenset[int]
    drops: dict[int, list[int]]
    replays: dict[int, list[list[int]]]
    saves: dict[int, OnTape]
    rest: Schedule


def make_lane(
    schedule: Schedule,
    saved: dict[int, int],
    ops: dict[int, LearnedOp],
    replayed: set[int],
    in_python: set[int],
) -> Lane | None:
    """Return the lane of a program, or None if nothing can go to the tape.

    Args:
        schedule: The program.
        saved: By saved tensor: its buffer.
        ops: By position.
        replayed: The positions of those that are replayed.
        in_python: Buffers that only Python knows, or that an op has overwritten which the tape cannot record.
    """
    buffers = {buffer_id: saved.get(first, -1) for buffer_id, first in schedule.first_saves.items()}
    makers = {made: position for position in replayed if position in ops for made in ops[position].makes}
    leaving = set(buffers.values()) - {-1}
    stays = in_python | (leaving & {saved.get(0)})
    stays.update(buffers[buffer_id] for buffer_id in schedule.swapped)
    stays.update(leaving - makers.keys())
    groups = _Groups()
    for position in replayed:
        op = ops.get(position)
        if op is None:
            continue
        members = [*op.makes, *(read for read in op.reads if read in makers or read in leaving)]
        groups.join(members)
        if not op.on_tape or stays.intersection(op.reads) or stays.intersection(op.makes):
            stays.update(op.makes)
    stopped = {groups.find(buffer) for buffer in stays}
    on_tape = {
        buffer_id for buffer_id, buffer in buffers.items() if buffer != -1 and groups.find(buffer) not in stopped
    }
    if not on_tape:
        return None
    rest = _without(schedule, on_tape)
    leaves_in_python = {buffer for buffer_id, buffer in buffers.items() if buffer_id not in on_tape}
    drops = {
        save: [schedule.first_saves[buffer_id] for buffer_id, _ in actions if buffer_id in on_tape]
        for save, actions in schedule.evictions.items()
    }
    replays = {
        save: [
            [schedule.first_saves[buffer_id] for buffer_id in group if buffer_id in on_tape] for group in due.replays
        ]
        for save, due in schedule.due.items()
    }
    dropped = {buffers[buffer_id] for buffer_id in on_tape}
    saves: dict[int, OnTape] = {}
    for number in schedule.planned_saves:
        buffer = saved.get(number, -1)
        if buffer == -1 or buffer in leaves_in_python:
            continue  # Python packs it
        saves[number] = OnTape.DROPPED if buffer in dropped else OnTape.KEPT
        if number in rest.evictions:
            saves[number] |= OnTape.SAVED_IN_PYTHON
        if number in rest.due:
            saves[number] |= OnTape.UNPACKED_IN_PYTHON
    return Lane(
        ops=frozenset(
            position
            for position in replayed
            if position in ops and ops[position].makes and groups.find(ops[position].makes[0]) not in stopped
        ),
        drops={save: firsts for save, firsts in drops.items() if firsts},
        replays={save: kept for save, found in replays.items() if (kept := [group for group in found if group])},
        saves=saves,
        rest=rest,
    )


def _without(schedule: Schedule, on_tape: set[int]) -> Schedule:
    """Return what is left of a schedule without some of its buffers."""
    evictions = {
        save: left
        for save, actions in schedule.evictions.items()
        if (left := tuple(action for action in actions if action[0] not in on_tape))
    }
    due: dict[int, Due] = {}
    for save, whole in schedule.due.items():
        groups = [tuple(buffer_id for buffer_id in group if buffer_id not in on_tape) for group in whole.replays]
        left = Due(whole.num_released, list(whole.fetches), [group for group in groups if group])
        if left.num_released or left.fetches or left.replays:
            due[save] = left
    return replace(schedule, evictions=evictions, due=due)


class _Groups:
    """Sets of buffers that are merged; each is named by one of its members. Mutable."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, member: int) -> int:
        """Return the name of a member's set."""
        root = member
        while (parent := self._parents.get(root, root)) != root:
            root = parent
        while (parent := self._parents.get(member, member)) != root:
            self._parents[member] = root
            member = parent
        return root

    def join(self, members: list[int]) -> None:
        """Merge the sets of these members."""
        for member in members[1:]:
            self._parents[self.find(member)] = self.find(members[0])
