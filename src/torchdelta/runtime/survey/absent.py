"""What a survey counts as swapped out in the class *all*: persistent tensors that nothing reads at the moment.

[Note: a survey of the class all]
A survey brings all persistent tensors back, because the program may read their memory. The run would not need that: all
that may leave, and that no running op or backward node reads, could be swapped out. So the need of each moment is what
is counted then, less the bytes of these tensors. It is a need that the run can meet: nothing else has to be evicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta._torch.fake import FakeTensor
from torchdelta.runtime.memory.candidates import LEAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Absent"]


class Absent:
    """The persistent tensors that could be swapped out at the present moment of a survey.

    Args:
        ledger: The ledger, before its survey begins.
        persistents: Evicts persistent tensors when no survey runs. All of them are here.
    """

    def __init__(self, ledger: Ledger, persistents: Persistents) -> None:
        self._ledger = ledger
        self._persistents = persistents
        self._candidates = candidates = persistents.candidates
        candidates.search(is_thorough=True)
        # Looked at now: the survey itself holds storages, so that later it would seem that the program holds them.
        self._staying = {known.record.id for known in candidates.known.values() if not candidates.may_leave(known)}

    def search(self) -> None:
        """Find persistent tensors that are new, such as parameters that an op has read for the first time."""
        self._candidates.search()

    def records(self, leaves: Iterable[torch.Tensor]) -> Iterator[StorageRecord]:
        """Yield the storages that could be swapped out now.

        Args:
            leaves: Leaves whose gradients the survey may have made.
        """
        locked = self._persistents.in_use.addresses()
        known = self._candidates.known
        for each in known.values():
            if not self._persistents.may_be_read(each) and self._may_leave(each.record, locked):
                yield each.record
        for leaf in leaves:
            if isinstance(leaf.grad, FakeTensor):
                record = self._ledger.find(leaf.grad)
                if record is not None and record.id not in known and self._may_leave(record, locked):
                    yield record

    def size_bytes(self, leaves: Iterable[torch.Tensor]) -> int:
        """Return the bytes that could be swapped out now."""
        return sum(record.size_bytes for record in self.records(leaves))

    def _may_leave(self, record: StorageRecord, locked: set[int]) -> bool:
        return (
            record.size_bytes >= LEAST_BYTES
            and record.id not in self._staying
            and record.address not in locked
            and not record.is_exported
            and not record.is_resizable
            and self._ledger.records.get(record.address) is record
        )
