"""Learns the outline of a program. See [Note: recording in part] in outline.py."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torchdelta._torch.ops import returns_tensors
from torchdelta.aten.batch_norm import TRAINING_POSITION
from torchdelta.aten.facts import Kind
from torchdelta.native.gate import Recorded, new_sequence
from torchdelta.native.saved_hooks import OnTape, new_saves
from torchdelta.runtime.follow.lane import Lane, LearnedOp, make_lane
from torchdelta.runtime.follow.outline import Outline
from torchdelta.runtime.state.tape import RANDOM_STATE_BYTES, Fresh, source_views, sources

if TYPE_CHECKING:
    from torchdelta.native.gate import Gate
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.state.buffer import Buffer, OpEntry

__all__ = ["Learning"]

_numbers: Final = itertools.count()


class Learning:
    """Learns the outline of a program's steps while one of them is recorded as a whole. Mutable.

    Args:
        program: What is followed.
        gate: Sees the ops.
        hooks: See the saved tensors.
        first: The buffer that is being saved: the first one of the step.
    """

    def __init__(self, program: Program, gate: Gate, hooks: NativeHooks, first: Buffer) -> None:
        self.program = program
        self._number = next(_numbers)
        self._gate = gate
        self._hooks = hooks
        self._needs: dict[int, int] = {}  # in bytes, by op
        self._composites: set[int] = set()  # ops that were recorded in parts: the tape cannot replay the whole
        self._replayed: set[int] = set()
        self._threads: set[int] = set()  # that replayed them: an accelerator's backward has its own thread
        self._ops: dict[int, LearnedOp] = {}  # by op, if it was recorded
        self._environment: tuple[Any, ...] | None = None  # of the first op
        self._makers: dict[int, int] = {}  # by buffer that was overwritten: the op that made it
        self._writes: dict[int, list[int]] = {}  # by op: the buffers whose content it ended
        self._written_saved: set[int] = set()  # saved buffers whose storages were written
        self._numbers: dict[int, int] = {}  # by saved tensor: its number among those that may leave
        self._saved = {0: first.id}  # by that number: the id of its buffer
        self._in_python: set[int] = set()  # buffers that were overwritten, or are made again by ops from before
        self._hashes: list[int] = []
        self._sizes_bytes: list[int] = []
        self._first = hooks.num_sizes()  # the position, among all saved tensors of the step, of the first one here

    def on_composite(self) -> None:
        """Note that the running op is recorded as the ops that it consists of, which the gate does not see."""
        self._composites.add(self._gate.position - 1)

    def on_op(self, entry: OpEntry | None, need_bytes: int, overwritten: list[Buffer]) -> None:
        """Note what the running op needs, what it reads, and whose content it has ended."""
        position = self._gate.position - 1
        if entry is not None:
            entry.position = self._number, position
            reads = tuple(source.id for source in sources(entry))
            makes = tuple(buffer.id for reference in entry.outputs if (buffer := reference()) is not None)
            if position in self._composites:
                part = self._ops.get(position, LearnedOp(reads=(), makes=(), on_tape=Recorded(0)))
                self._ops[position] = replace(part, reads=part.reads + reads, makes=part.makes + makes)
            else:
                self._ops[position] = LearnedOp(reads=reads, makes=makes, on_tape=self._on_tape(entry))
            need_bytes += RANDOM_STATE_BYTES if entry.random_state is not None else 0
        is_on_tape = position in self._ops and bool(self._ops[position].on_tape)
        if need_bytes:
            self._needs[position] = need_bytes + (self._needs.get(position, 0) if position in self._composites else 0)
        for buffer in overwritten:
            if buffer.num_saved or not is_on_tape:
                self._in_python.add(buffer.id)
            self._writes.setdefault(position, []).append(buffer.id)
            if buffer.op is not None:
                self._makers[buffer.id] = self._position_of(buffer.op)
            if buffer.num_saved:
                self._written_saved.add(buffer.id)

    def _on_tape(self, entry: OpEntry) -> Recorded:
        """Return how the tape can record an op. See [Note: which part goes to the tape] in lane.py."""
        facts = entry.facts
        if self._environment is None:
            self._environment = entry.environment
        is_torchs = entry.func.namespace == "aten" and returns_tensors(entry.func)
        # Buffers of other devices have no bytes. The tape knows tensors of one device, and numbers.
        has_others = any(view.shape and not view.buffer.size_bytes for view in source_views(entry))
        if (
            not is_torchs
            or has_others
            or facts.conjugates_inside
            or facts.casts_inside
            or entry.environment != self._environment
        ):
            return Recorded(0)
        how = Recorded.ON_TAPE | Recorded.IS_CONSTANT if facts.is_constant else Recorded.ON_TAPE
        if facts.keeps_statistics:
            if entry.args[TRAINING_POSITION].__class__ is not bool:
                return Recorded(0)  # another argument stands there: it always trains, or has no statistics
            how |= Recorded.HAS_STATISTICS
        elif facts.kind is Kind.WRITE and facts.written_positions == (0,) and not facts.written_keywords:
            if entry.args[0].__class__ is list:
                return Recorded(0)  # a foreach op
            how |= Recorded.OVERWRITES if entry.args[0].__class__ is Fresh else Recorded.WRITES
        elif facts.kind is not Kind.COMPUTE:
            return Recorded(0)
        return how | Recorded.IS_RANDOM if entry.random_state is not None else how

    def on_save(self, number: int, buffer: Buffer) -> None:
        """Note the number of the tensor that is being saved, and its buffer."""
        self._numbers[self._hooks.num_sizes() - 1 - self._first] = number
        self._saved[number] = buffer.id

    def on_forward_end(self) -> None:
        """Take what the gate and the hooks have seen: backward begins."""
        self._hashes = self._gate.learned()
        self._sizes_bytes = self._hooks.sizes()[self._first :]

    def on_replay(self, entry: OpEntry) -> None:
        """Note that an op is replayed."""
        self._threads.add(threading.get_ident())
        position = self._position_of(entry)
        if position >= 0:  # else it ran before, where all ops are recorded
            self._replayed.add(position)
        else:
            self._in_python.update(buffer.id for reference in entry.outputs if (buffer := reference()) is not None)

    def _position_of(self, entry: OpEntry) -> int:
        """Return an op's position in this step; -1 if it ran before, as in a graph that lives since an earlier step."""
        number, position = entry.position
        return position if number == self._number else -1

    def outline(self, saved_bytes: int) -> Outline | None:
        """Return the outline of a step that has saved so much; None if it has not saved the tensors of the program."""
        schedule = self.program.schedule
        if list(self._numbers.values()) != list(range(1, schedule.num_saves)):
            return None
        numbers = [self._numbers.get(index, -1) for index in range(len(self._sizes_bytes))]
        positions = range(len(self._hashes))
        recorded = self._recorded()
        lane = None
        if len(self._threads) == 1:  # the native tape has no locks for a backward on several threads
            lane = make_lane(schedule, self._saved, self._ops, self._replayed, self._in_python)
        on_tape = lane.saves if lane is not None else {}
        others = [self._ops[position] for position in self._replayed if lane is None or position not in lane.ops]
        in_python = {buffer for op in others for buffer in (*op.reads, *op.makes)} | self._written_in_python(on_tape)
        return Outline(
            ops=new_sequence(
                self._hashes,
                [self._needs.get(position, 0) for position in positions],
                [self._how_recorded(position, recorded, lane, in_python) for position in positions],
            ),
            saves=new_saves(
                self._sizes_bytes,
                [number if number in schedule.planned_saves else -1 for number in numbers],
                [on_tape.get(number, OnTape(0)) for number in numbers],
            ),
            lane=lane,
            settings=self._environment,
            num_ops=len(positions),
            num_recorded=len(recorded),
            saved_bytes=saved_bytes,
        )

    def _how_recorded(self, position: int, recorded: set[int], lane: Lane | None, in_python: set[int]) -> Recorded:
        """Return how to record an op; `in_python` are the buffers whose writes Python has to see beside the tape."""
        if position not in recorded:
            return Recorded(0)
        if lane is not None and position in lane.ops:
            return Recorded.IN_PYTHON | self._ops[position].on_tape
        is_replayed = position in self._replayed
        if lane is not None and not is_replayed and not in_python.intersection(self._writes[position]):
            return Recorded.IN_PYTHON | Recorded.UNSEEN
        return Recorded.IN_PYTHON

    def _written_in_python(self, on_tape: dict[int, OnTape]) -> set[int]:
        """Return the saved buffers that were written and that Python packs, too, in a step on the tape.

        The others have only handles in C++, which need not know of a write. A batch norm writes the statistics that it
        saves. If Python recorded it, the gate would give Python also the ops in place on its output. What these read
        beside it would stay in memory, even where the tape drops it: Python does not know how the tape makes it.
        """
        planned = self.program.schedule.planned_saves
        packed = {self._saved[number] for number in self._saved if number == 0 or number in planned - on_tape.keys()}
        return self._written_saved - (set(self._saved.values()) - packed)

    def _recorded(self) -> set[int]:
        """Return the ops to record: those that are replayed, and those that write what these or a saved tensor read."""
        recorded = set(self._replayed)
        read = {buffer_id for position in recorded for buffer_id in self._reads(position)}
        for position, overwritten in sorted(self._writes.items()):
            is_read = any(buffer_id in read or self._makers.get(buffer_id) in recorded for buffer_id in overwritten)
            if is_read or self._written_saved.intersection(overwritten):
                recorded.add(position)
                read.update(self._reads(position))
        return recorded

    def _reads(self, position: int) -> tuple[int, ...]:
        return self._ops[position].reads if position in self._ops else ()
