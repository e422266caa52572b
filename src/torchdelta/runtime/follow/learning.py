"""Learns the outline of a program. See [Note: recording in part] in outline.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdelta._torch.ops import returns_tensors
from torchdelta.aten.facts import Kind
from torchdelta.native.gate import Recorded, new_sequence
from torchdelta.native.saved_hooks import OnTape, new_saves
from torchdelta.runtime.follow.lane import Lane, LearnedOp, make_lane
from torchdelta.runtime.follow.outline import Outline
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    from torchdelta.native.gate import Gate
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.state.buffer import Buffer, OpEntry

__all__ = ["Learning"]


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
        self._gate = gate
        self._hooks = hooks
        self._needs: dict[int, int] = {}  # in bytes, by op
        self._replayed: set[int] = set()
        self._ops: dict[int, LearnedOp] = {}  # by op, if it was recorded
        self._batch_norms: set[int] = set()
        self._environment: tuple[Any, ...] | None = None  # of the first op
        self._makers: dict[int, int] = {}  # by buffer that was overwritten: the op that made it
        self._writes: dict[int, list[int]] = {}  # by op: the buffers whose content it ended
        self._written_saved: set[int] = set()  # ops that have written a storage of which a tensor was saved
        self._numbers: dict[int, int] = {}  # by saved tensor: its number among those that may leave
        self._saved = {0: first.id}  # by that number: the id of its buffer
        self._in_python: set[int] = set()  # buffers that were overwritten, or are made again by ops from before
        self._hashes: list[int] = []
        self._sizes_bytes: list[int] = []
        self._first = hooks.num_sizes()  # the position, among all saved tensors of the step, of the first one here

    def on_op(self, entry: OpEntry | None, need_bytes: int, overwritten: list[Buffer]) -> None:
        """Note what the running op needs, what it reads, and whose content it has ended."""
        position = self._gate.position - 1
        if entry is not None:
            entry.position = position
            self._ops[position] = LearnedOp(
                reads=tuple(source.id for source in sources(entry)),
                makes=tuple(buffer.id for reference in entry.outputs if (buffer := reference()) is not None),
                is_simple=self._is_simple(entry),
            )
            if entry.facts.keeps_statistics:
                self._batch_norms.add(position)
        if need_bytes:
            self._needs[position] = need_bytes
        for buffer in overwritten:
            self._in_python.add(buffer.id)
            self._writes.setdefault(position, []).append(buffer.id)
            if buffer.op is not None:
                self._makers[buffer.id] = buffer.op.position
            if buffer.num_saved:
                self._written_saved.add(position)

    def _is_simple(self, entry: OpEntry) -> bool:
        """Return whether the tape can record an op. See [Note: which part goes to the tape] in lane.py."""
        facts = entry.facts
        if self._environment is None:
            self._environment = entry.environment
        return (
            (facts.kind is Kind.COMPUTE or facts.keeps_statistics)
            and not facts.is_random
            and not facts.conjugates_inside
            and not facts.casts_inside
            and entry.environment == self._environment
            and entry.func.namespace == "aten"
            and returns_tensors(entry.func)
        )

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
        if entry.position >= 0:  # else it ran before, where all ops are recorded
            self._replayed.add(entry.position)
        else:
            self._in_python.update(buffer.id for reference in entry.outputs if (buffer := reference()) is not None)

    def outline(self) -> Outline | None:
        """Return the outline; None if the saved tensors were not those of the program."""
        schedule = self.program.schedule
        if list(self._numbers.values()) != list(range(1, schedule.num_saves)):
            return None
        numbers = [self._numbers.get(index, -1) for index in range(len(self._sizes_bytes))]
        positions = range(len(self._hashes))
        recorded = self._recorded()
        lane = make_lane(schedule, self._saved, self._ops, self._replayed, self._in_python)
        on_tape = lane.saves if lane is not None else {}
        return Outline(
            ops=new_sequence(
                self._hashes,
                [self._needs.get(position, 0) for position in positions],
                [self._how_recorded(position, recorded, lane) for position in positions],
            ),
            saves=new_saves(
                self._sizes_bytes,
                [number if number in schedule.planned_saves else -1 for number in numbers],
                [on_tape.get(number, OnTape(0)) for number in numbers],
            ),
            lane=lane,
            num_ops=len(positions),
            num_recorded=len(recorded),
        )

    def _how_recorded(self, position: int, recorded: set[int], lane: Lane | None) -> Recorded:
        if position not in recorded:
            return Recorded.NOT
        if lane is None or position not in lane.ops:
            return Recorded.IN_PYTHON
        return Recorded.ON_TAPE_WITH_STATISTICS if position in self._batch_norms else Recorded.ON_TAPE

    def _recorded(self) -> set[int]:
        """Return the ops to record: those that are replayed, and those that write what these or a saved tensor read."""
        recorded = set(self._replayed)
        read = {buffer_id for position in recorded for buffer_id in self._reads(position)}
        for position, overwritten in sorted(self._writes.items()):
            is_read = any(buffer_id in read or self._makers.get(buffer_id) in recorded for buffer_id in overwritten)
            if is_read or position in self._written_saved:
                recorded.add(position)
                read.update(self._reads(position))
        return recorded

    def _reads(self, position: int) -> tuple[int, ...]:
        return self._ops[position].reads if position in self._ops else ()
