"""Learns the outline of a program. See [Note: recording in part] in outline.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.native.gate import new_sequence
from torchdelta.native.saved_hooks import new_saves
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
    """

    def __init__(self, program: Program, gate: Gate, hooks: NativeHooks) -> None:
        self.program = program
        self._gate = gate
        self._hooks = hooks
        self._needs: dict[int, int] = {}  # in bytes, by op
        self._replayed: set[int] = set()
        self._reads: dict[int, list[int]] = {}  # by op: the ids of the buffers that it reads
        self._makers: dict[int, int] = {}  # by buffer that was overwritten: the op that made it
        self._writes: dict[int, list[int]] = {}  # by op: the buffers whose content it ended
        self._written_saved: set[int] = set()  # ops that have written a storage of which a tensor was saved
        self._numbers: dict[int, int] = {}  # by saved tensor: its number among those that may leave
        self._hashes: list[int] = []
        self._sizes_bytes: list[int] = []
        self._first = hooks.num_sizes()  # the position, among all saved tensors of the step, of the first one here

    def on_op(self, entry: OpEntry | None, need_bytes: int, overwritten: list[Buffer]) -> None:
        """Note what the running op needs, what it reads, and whose content it has ended."""
        position = self._gate.position - 1
        if entry is not None:
            entry.position = position
            self._reads[position] = [source.id for source in sources(entry)]
        if need_bytes:
            self._needs[position] = need_bytes
        for buffer in overwritten:
            self._writes.setdefault(position, []).append(buffer.id)
            if buffer.op is not None:
                self._makers[buffer.id] = buffer.op.position
            if buffer.num_saved:
                self._written_saved.add(position)

    def on_save(self, number: int) -> None:
        """Note the number of the tensor that is being saved."""
        self._numbers[self._hooks.num_sizes() - 1 - self._first] = number

    def on_forward_end(self) -> None:
        """Take what the gate and the hooks have seen: backward begins."""
        self._hashes = self._gate.learned()
        self._sizes_bytes = self._hooks.sizes()[self._first :]

    def on_replay(self, entry: OpEntry) -> None:
        """Note that an op is replayed."""
        if entry.position >= 0:  # else it ran before, where all ops are recorded
            self._replayed.add(entry.position)

    def outline(self) -> Outline | None:
        """Return the outline; None if the saved tensors were not those of the program."""
        schedule = self.program.schedule
        if list(self._numbers.values()) != list(range(schedule.first_planned + 1, schedule.num_saves)):
            return None
        numbers = [self._numbers.get(index, -1) for index in range(len(self._sizes_bytes))]
        positions = range(len(self._hashes))
        recorded = self._recorded()
        return Outline(
            ops=new_sequence(
                self._hashes,
                [self._needs.get(position, 0) for position in positions],
                [position in recorded for position in positions],
            ),
            saves=new_saves(
                self._sizes_bytes, [number if number in schedule.planned_saves else -1 for number in numbers]
            ),
            num_ops=len(positions),
            num_recorded=len(recorded),
        )

    def _recorded(self) -> set[int]:
        """Return the ops to record: those that are replayed, and those that write what these or a saved tensor read."""
        recorded = set(self._replayed)
        read = {buffer_id for position in recorded for buffer_id in self._reads.get(position, ())}
        for position, overwritten in sorted(self._writes.items()):
            is_read = any(buffer_id in read or self._makers.get(buffer_id) in recorded for buffer_id in overwritten)
            if is_read or position in self._written_saved:
                recorded.add(position)
                read.update(self._reads.get(position, ()))
        return recorded
