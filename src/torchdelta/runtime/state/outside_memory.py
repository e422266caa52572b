"""Finds tensors whose memory belongs to code outside of torch, which may fill it anew at any time.

[Note: memory outside of torch]
`torch.from_numpy`, `torch.frombuffer` and DLPack make tensors on memory that something else allocated. A training that
fills a NumPy array for each part of a step, and keeps the graph, is right without a budget if an op copies the array
first; a replay of that op would read what the array holds later, and no version shows it. So ops that read such memory
are not replayed. Such a storage is known by the function that will free it. Storages that are read from a file, mapped
ones too, have others. Without the native module, and in shared memory, this is not noticed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.storages import address_of, storage_behind
from torchdelta._torch.tensors import base_of
from torchdelta.native.weak_storage import weak_storage_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.weak_storage import WeakStorage

__all__ = ["is_outside_memory", "is_outside_storage"]


def is_outside_memory(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is outside of torch: see [Note: memory outside of torch].

    Parameters are left out: a library may load them so, and does not write them again.
    """
    if isinstance(tensor, torch.nn.Parameter) or isinstance(base_of(tensor), torch.nn.Parameter):
        return False
    return is_outside_storage(storage_behind(tensor))


def is_outside_storage(storage: torch.UntypedStorage) -> bool:
    """Return whether NumPy, DLPack or another library has allocated the memory of a storage."""
    if storage.device.type != "cpu" or storage.resizable() or storage.is_shared():
        return False
    weak_storage = weak_storage_type()
    return weak_storage is not None and weak_storage(address_of(storage)).deleter() == _deleter(weak_storage)


@functools.cache
def _deleter(weak_storage: Callable[[int], WeakStorage]) -> int:
    """Return the address of the function that frees memory which torch has not allocated."""
    storage = torch.frombuffer(bytearray(8), dtype=torch.uint8).untyped_storage()
    deleter = weak_storage(address_of(storage)).deleter()
    del storage  # not before: the weak reference is made from an address
    return deleter
