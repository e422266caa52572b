"""What a survey counts as swapped out in the class *all*: persistent tensors that nothing reads at the moment.

[Note: a survey of the class all]
A survey brings all persistent tensors back, because the program may read their memory. The run would not need that: all
that may leave, and that no running op or backward node reads, could be swapped out. So the need of each moment is what
is counted then, less the bytes of these tensors. Gradients that the survey has made count as those of the run would:
they may leave if their parameters belong to a known model or optimizer, unless they share their memory. What the tier
has no space for is added at the end (`EverythingNeed.finish`).
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.fake import FakeTensor
from torchdelta.runtime.memory import candidates

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Absent", "may_any_leave"]


def may_any_leave() -> bool:
    """Return whether persistent tensors may leave at all: none does while torch.distributed is in use."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


class Absent:
    """The persistent tensors that could be swapped out at the present moment.

    Args:
        ledger: The ledger, before a survey begins.
        persistents: Evicts persistent tensors when no survey runs.
        transfers: Has the tier.
    """

    def __init__(self, ledger: Ledger, persistents: Persistents, transfers: Transfers) -> None:
        self._ledger = ledger
        self._transfers = transfers
        self._persistents = persistents
        self._candidates = persistents.candidates
        self._seen: set[int] = set()  # ids of records
        self._staying: set[int] = set()  # those of them that may not leave
        self._candidates.search(is_thorough=not self._candidates.was_searched)
        self._judge_new()

    def search(self) -> None:
        """Find persistent tensors that are new, such as parameters that an op has read for the first time."""
        self._candidates.search()
        self._judge_new()

    def _judge_new(self) -> None:
        """Find out which of the new tensors stay. The survey itself holds storages later, as the program might."""
        locked = self._persistents.in_use.addresses()
        for known in self._candidates.known.values():
            record = known.record
            if record.id in self._seen or record.address in locked:  # what is in use seems to be held
                continue
            self._seen.add(record.id)
            if record.emptied is None and not self._candidates.may_leave(known):
                self._staying.add(record.id)

    def stays(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would stay, whatever is read."""
        record = self._find(tensor)
        known = self._candidates.known.get(record.id) if record is not None else None
        if known is None or self._persistents.compiled.may_read(known):
            return True
        return known.record.emptied is None and not self._may_leave(known.record, set())

    def records(self, leaves: Iterable[torch.Tensor]) -> Iterator[StorageRecord]:
        """Yield the storages that could be swapped out now.

        Args:
            leaves: Leaves whose gradients the survey may have made.
        """
        locked = self._persistents.in_use.addresses()
        known = self._candidates.known
        for each in known.values():
            if not self._persistents.compiled.may_read(each) and self._may_leave(each.record, locked):
                yield each.record
        gradients = [record for leaf in leaves if (record := self._made_gradient(leaf)) is not None]
        num_uses = collections.Counter(record.id for record in gradients)
        for record in gradients:
            if num_uses[record.id] == 1 and record.id not in known and self._may_leave(record, locked):
                yield record

    def size_bytes(self, leaves: Iterable[torch.Tensor]) -> int:
        """Return the bytes that could be swapped out now, if the tier has the space."""
        return sum(record.size_bytes for record in self.records(leaves))

    def space_bytes(self) -> int | None:
        """Return what the tier has for persistent tensors that are here now; None: no limit."""
        free_bytes = self._transfers.free_bytes()
        if free_bytes is None:
            return None
        return free_bytes + sum(each.record.size_bytes for each in self._candidates.known.values() if each.record.spare)

    def known_bytes(self) -> int:
        """Return the bytes of the persistent tensors that are known."""
        return sum(each.record.size_bytes for each in self._candidates.known.values())

    def _made_gradient(self, leaf: torch.Tensor) -> StorageRecord | None:
        """Return the storage of a gradient that the survey has made for a known parameter."""
        gradient = leaf.grad
        return self._find(gradient) if isinstance(gradient, FakeTensor) and self.owns(leaf) else None

    def owns(self, leaf: torch.Tensor) -> bool:
        """Return whether a leaf belongs to a known model or optimizer. Other leaves stay, and so do their gradients."""
        record = self._find(leaf)
        return record is not None and record.id in self._candidates.known

    def _find(self, tensor: torch.Tensor) -> StorageRecord | None:
        try:
            return self._ledger.find(tensor) if tensor.layout is torch.strided else None
        except RuntimeError:  # it has no storage
            return None

    def _may_leave(self, record: StorageRecord, locked: set[int]) -> bool:
        return (
            record.size_bytes >= candidates.LEAST_BYTES
            and record.id not in self._staying
            and record.address not in locked
            and not record.is_exported
            and not record.num_writing
            and not record.is_resizable
            and self._ledger.records.get(record.address) is record
        )
