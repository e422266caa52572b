"""Knows which storages live, of those that ops have made while it watched."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.modes import TorchDispatchMode
from torchdelta._torch.storages import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class LiveStorages(TorchDispatchMode):
    """Watches the storages of fake tensors: those that it is given, and those that ops make while it is on.

    It keeps nothing alive: see [Note: a storage lives as its fake one does] in mode.py.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        for storage in storages:
            self._watch(storage)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return those that live now, oldest first."""
        return [storage for reference in list(self._alive.values()) if (storage := reference()) is not None]

    def size_bytes(self) -> int:
        """Return the bytes of those that live now."""
        return sum(storage.nbytes() for storage in self.storages())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and watch what it returns."""
        del types
        output = func(*args, **(kwargs or {}))
        self._watch_tensors(output)
        return output

    def _watch_tensors(self, output: Any) -> None:
        if isinstance(output, FakeTensor):
            try:
                self._watch(output.untyped_storage())
            except RuntimeError:
                return  # a layout without a storage
        elif isinstance(output, list | tuple):
            for one in output:
                self._watch_tensors(one)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = address_of(storage)
        if address not in self._alive:
            self._alive[address] = weakref.ref(storage, lambda _: self._alive.pop(address, None))
