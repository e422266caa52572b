"""The gradients of leaves, which the engine adds to where no op is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.tensors import storage_of
from torchdelta.runtime.state.buffer import Stays

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.record.python_writes import PythonWrites
    from torchdelta.runtime.record.recorder import Recorder

__all__ = ["LeafGradients"]


class LeafGradients:
    """What a backward does to the `.grad` of leaves. Mutable.

    Args:
        recorder: Knows the contents of storages.
        python_writes: Knows the native tape, if there is one.
    """

    def __init__(self, recorder: Recorder, python_writes: PythonWrites) -> None:
        self.pending: list[Any] = []  # leaves whose .grad may have changed since the last count
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._python_writes = python_writes

    def end_read(self, leaves: Iterable[Any]) -> None:
        """End the contents of gradients that recorded ops have read: the engine is about to add to them.

        The forward may read `p.grad` (to add a multiple of it to the loss, for example), and a replay in this backward
        then needs what it was before.
        """
        found = [gradient for leaf in leaves if (gradient := leaf.grad) is not None]
        gradients = [one for one in found if one.__class__ is torch.Tensor and one.layout is torch.strided]
        if gradients and self._python_writes.before_write is not None:
            self._python_writes.before_write(*gradients)
        ended: set[int] = set()
        for gradient in gradients:
            try:
                record = self._ledger.find(gradient)
            except RuntimeError:  # torch.func's wrappers have no storage
                continue
            read = record.current if record is not None else None
            if record is None or record.id in ended or read is None or not (read.num_views or read.num_saved):
                continue
            ended.add(record.id)
            if record.emptied is not None:
                assert self._recorder.persistents is not None
                self._recorder.persistents.bring_record(record)
            self._recorder.end_content(gradient)
            if read.num_saved:
                # If autograd does not notice the addition (`.data` has its own version), unpacking returns the sum.
                self._ledger.stay(self._ledger.written(gradient, read, None, "accumulation", 0), Stays.IN_FLIGHT)

    def count(self) -> None:
        """Count the `.grad` of leaves whose gradient was just accumulated."""
        pending, self.pending = self.pending, []
        self._ledger.recheck_unwatched()
        for leaf in pending:
            gradient = leaf.grad
            if gradient is None:
                continue
            if gradient.__class__ is not torch.Tensor:
                self._ledger.know_inner(gradient)
            elif gradient.layout is torch.strided:
                storage = storage_of(gradient)
                if storage is None:  # torch.func's wrappers have none
                    continue
                self._ledger.know(storage)
                self._recorder.observing.observer.on_leaf_gradient(leaf, gradient)
