"""Tracks which storages must stay for now: arguments of running ops, and what the running backward node reads."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.sparse import parts_of_sparse
from torchdelta._torch.storages import address_of, storage_address, storage_behind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["InUse", "arguments_in", "is_object_held"]


class InUse:
    """The storages in use. Mutable; one for each session."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # What the running ops read, the innermost last. An op's arguments are looked at only if something has to leave.
        self._running: list[Any] = []
        self._locks: list[set[int]] = [set()]  # addresses; two sets for each backward that runs

    def begin(self, things: Any) -> None:
        """An op begins that reads these tensors and storages, in lists and dicts too, or these records."""
        self._running.append(things)

    def end(self) -> None:
        """The op that began last has ended."""
        self._running.pop()

    def begin_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """A backward begins. The engine reads `tensors` at any time."""
        self._locks.append({record.address for record in self.records(tensors)})
        self._locks.append(set())

    def end_backward(self) -> None:
        """A backward ends."""
        del self._locks[-2:]

    def lock(self, tensors: Iterable[torch.Tensor]) -> None:
        """In a backward, let tensors stay until `unlock`."""
        if len(self._locks) > 1:
            self._locks[-1].update(record.address for record in self.records(tensors))

    def unlock(self) -> None:
        """A node of backward, or the gap after it, has ended."""
        self._locks[-1].clear()

    def addresses(self) -> set[int]:
        """Return the addresses of all storages that must stay."""
        found = set().union(*self._locks)
        for things in self._running:
            found.update(record.address for record in self.records(arguments_in(things)))
        return found

    def records(self, things: Iterable[Any]) -> Iterator[StorageRecord]:
        """Yield the records of tensors and storages, so far as they are known."""
        records = self._ledger.records
        for thing in things:
            try:
                if isinstance(thing, torch.Tensor):
                    record = records.get(storage_address(thing))
                elif isinstance(thing, torch.UntypedStorage):
                    record = records.get(address_of(thing))
                else:
                    continue
            except RuntimeError:  # it has no storage
                yield from self.records(parts_of_sparse(thing) if isinstance(thing, torch.Tensor) else ())
                continue
            if record is not None:
                yield record


def arguments_in(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors and storages among arguments, and in lists and dicts among them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor | torch.UntypedStorage):
            yield argument
        elif argument.__class__ in (list, tuple):
            yield from arguments_in(argument)
        elif isinstance(argument, dict):
            yield from arguments_in(argument.values())


def _num_references(record_reference: Any) -> int:
    storage = record_reference()
    return sys.getrefcount(storage)


def is_object_held(record: StorageRecord) -> bool:
    """Return whether Python code holds the object of a storage, through which it can be read without an op."""
    return record.reference is None or _num_references(record.reference) > _NUM_UNHELD


def _num_references_unheld() -> int:
    tensor = torch.empty(1)
    return _num_references(weakref.ref(storage_behind(tensor)))


_NUM_UNHELD = _num_references_unheld()
