"""Tensors that the caller gives as `out=`: how much memory they have, and by how much an op makes it grow.

An op allocates no new storage for `out`. It resizes an `out` whose shape differs from the result's, and the storage
grows only if it is too small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.tensors import storage_of

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts

__all__ = ["growth_bytes", "out_buffers", "spare_bytes"]


def out_buffers(facts: OpFacts, kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return the tensors that an op writes through keyword arguments."""
    found: list[torch.Tensor] = []
    for keyword in facts.written_keywords:
        value: Any = (kwargs or {}).get(keyword)
        items: Any = value if isinstance(value, list | tuple) else (value,)
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


def spare_bytes(buffer: torch.Tensor) -> int:
    """Return how many bytes fit into a tensor's storage from its first element on; 0 without a storage.

    In backward the tensor may be a gradient, whose storage object must not be made (see [Note: storages are known by
    address] in _torch/storages.py): there it returns the bytes of the tensor's own elements.
    """
    if buffer.layout is not torch.strided:
        return 0
    if graph_task_id() != -1 and not torch.is_grad_enabled():
        return buffer.numel() * buffer.element_size()
    storage = storage_of(buffer)
    return 0 if storage is None else storage.nbytes() - int(buffer.storage_offset()) * buffer.element_size()


def growth_bytes(buffers: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Return by how many bytes `buffers` grow, given the `results` of the same op on meta copies of them."""
    grown_bytes = 0
    for buffer, result in zip(buffers, results, strict=True):
        if buffer.shape != result.shape:
            grown_bytes += max(0, result.untyped_storage().nbytes() - spare_bytes(buffer))
    return grown_bytes
