"""Storages: their addresses, how many hold them, and their objects made anew. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# [Note: storages are known by address]
# `Tensor.untyped_storage()` makes a Python object that the storage keeps for ever, and which counts as one of its
# holders (torch 2.13). The autograd engine accumulates gradients in place only where the storage has ONE holder, so
# looking at a gradient's storage object would turn an in-place addition into an allocation. `_storage_address` gives
# the same key as `UntypedStorage._cdata` without making the object.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address
# The same of a storage object that is at hand anyway.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
storage_num_holders: Callable[[int], int] = torch._C._storage_Use_Count


def storage_at(address: int) -> torch.UntypedStorage | None:
    """Return the storage object of a storage, by its address; None when the storage has died.

    The caller must have a `WeakStorage` (native/weak_storage.py) of that storage, or know that it is alive: else the
    address may be anything's.
    """
    return torch.UntypedStorage._new_with_weak_ptr(address)


def storage_over(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage that looks at memory which it does not own; the caller keeps that memory in place."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return storage


# [Note: methods that are patched]
# While a scope of the class "all" is open, the methods by which the program reaches a tensor's memory bring back what
# has left (raw_access.py). The library itself calls torch's own.
storage_behind: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
tensor_address: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
memory_behind: Callable[[torch.UntypedStorage], int] = torch._C.StorageBase.data_ptr
resize_storage: Callable[[torch.UntypedStorage, int], Any] = torch._C.StorageBase.resize_
