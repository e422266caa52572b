"""Which storages are alive, asked of the garbage collector: a measure independent of the runtime's own counts."""

from __future__ import annotations

import gc

import torch


def live_storages() -> dict[int, int]:
    """Return identity -> bytes of every storage that a Python tensor or storage holds."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type(), not isinstance: lazy proxies (torch, transformers) run code when they are asked for their class.
        kind = type(candidate)
        if kind is torch.UntypedStorage:
            storage = candidate
        elif issubclass(kind, torch.Tensor):
            if candidate.layout is not torch.strided or candidate.device.type != "cpu":
                continue
            storage = candidate.untyped_storage()
            if candidate.grad_fn is None and candidate.is_leaf and candidate.grad is not None:
                gradient = candidate.grad.untyped_storage()
                storages[gradient._cdata] = gradient.nbytes()
        else:
            continue
        storages[storage._cdata] = storage.nbytes()
    return storages
