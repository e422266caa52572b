"""Takes over from the native tape: makes in the ledger what the tape has recorded, as if Python had recorded it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modes import Quietly
from torchdelta._torch.ops import overload_of
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.runtime.record.saved import Handle
from torchdelta.runtime.state.buffer import Buffer, OpEntry, View
from torchdelta.runtime.state.contents import UNKNOWN_VERSION
from torchdelta.runtime.state.tape import Fresh, Scratch

if TYPE_CHECKING:
    from torchdelta.native.tape import Tape
    from torchdelta.runtime.memory.room import Room

__all__ = ["take_over"]


def take_over(tape: Tape, saves: list[object], room: Room, environment: tuple[Any, ...]) -> list[object]:
    """Return handles of saved tensors whose contents the tape has dropped.

    Args:
        tape: Has recorded the ops that make these contents.
        saves: The saved tensors.
        room: Knows the ledger.
        environment: The numeric settings of the recorded ops.
    """
    builder = _Builder(room, environment)
    with Quietly():
        return tape.describe(saves, builder)


class _Builder:
    """Makes buffers, ops and handles. See `native.tape.Builder`."""

    def __init__(self, room: Room, environment: tuple[Any, ...]) -> None:
        self._room = room
        self._ledger = room.ledger
        self._environment = environment
        self._buffers: dict[int, Buffer] = {}
        self._views: list[View] = []  # so that buffers without an op stay held until other views see them

    def resident(self, name: int, tensor: torch.Tensor, version: int) -> None:
        was_watched = self._is_watched(tensor)
        view = self._ledger.view_of(tensor)
        buffer = view.buffer
        if buffer.strong is not None and not was_watched:  # else the ledger knows an earlier one
            self._ledger.watch(buffer, tensor, version)
        self._views.append(view)
        self._buffers[name] = buffer

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        """Return whether the ledger knows the version that a tensor's content should have."""
        record = self._ledger.find(tensor)
        buffer = record.current if record is not None else None
        return buffer is not None and buffer.witness is not None and buffer.witness_version != UNKNOWN_VERSION

    def made(
        self,
        op: str,
        overload: str,
        args: list[Any],
        kwargs: dict[str, Any],
        grad_enabled: bool,
        need_bytes: int,
        random_state: tuple[torch.Generator, torch.Tensor] | None,
        outputs: list[tuple[int, int, int]],
    ) -> None:
        func = overload_of(op, overload)
        facts = facts_of(func)
        entry = OpEntry(func, facts, args, kwargs or None)
        entry.grad_enabled = grad_enabled
        entry.environment = self._environment
        entry.random_state = random_state
        if facts.kind is Kind.COMPUTE or facts.keeps_statistics:
            entry.output_bytes = sum(size_bytes for _, _, size_bytes in outputs)
        entry.workspace_bytes = max(0, need_bytes - entry.output_bytes)
        for name, index, size_bytes in outputs:
            buffer = self._buffers[name] = self._ledger.dropped(size_bytes, entry, facts.name, index)
            entry.outputs.append(weakref.ref(buffer))

    def view(self, name: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> View:
        return View.of(self._buffers[name], torch.Size(shape), stride, offset, dtype)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Scratch:
        return Scratch.of(torch.Size(shape), dtype, self._ledger.device)

    def fresh(
        self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, size_bytes: int
    ) -> Fresh:
        return Fresh.of(torch.Size(shape), stride, offset, dtype, self._ledger.device, size_bytes)

    def save(self, view: View, probe: torch.Tensor, version: int, number: int) -> Handle:
        del number  # the program is left
        buffer = view.buffer
        handle = Handle.of(self._ledger, view, probe, version)
        if buffer.num_saved == 0:
            self._room.counters.saved_bytes += buffer.size_bytes
            buffer.has_left = True
        self._ledger.save(buffer)
        self._room.costs.note_dropped(buffer)
        return handle
