"""Finds the tensors that unrecorded code wrote, such as a compiled region, by their version counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.tensors import version_of
from torchdelta.runtime.state.buffer import Residence
from torchdelta.runtime.state.kinds import runs_own_ops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["UnseenWrites"]


class UnseenWrites:
    """Compares the versions of tensors before and after unrecorded code.

    Args:
        ledger: Knows the tensors' contents.
        room: Finishes copies that still read the tensors; knows what replays read.
        arguments: What the code may write; only plain tensors are watched.
    """

    def __init__(self, ledger: Ledger, room: Room, arguments: Iterable[Any]) -> None:
        self._ledger = ledger
        self._costs = room.costs
        self._before: list[tuple[torch.Tensor, int]] = []
        for argument in arguments:
            if (
                not isinstance(argument, torch.Tensor)
                or runs_own_ops(argument.__class__)
                or argument.layout is not torch.strided
                or argument.is_inference()
            ):
                continue
            record = ledger.find(argument)
            if record is not None and record.current is not None:
                room.transfers.finish_copy(record.current)
                self._before.append((argument, version_of(argument)))

    def end(self) -> None:
        """Invalidate the recorded content of arguments whose version changed.

        The old content is recomputed if a recorded op made it; otherwise reading it is an error.
        """
        for tensor, version in self._before:
            record = self._ledger.find(tensor)
            if version_of(tensor) == version or record is None:
                continue
            old = self._ledger.invalidate(record)
            if old is not None and old.residence is Residence.GONE:
                self._costs.note_lost(old)
