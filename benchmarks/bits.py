"""Fingerprints of what a step computed, taken without running a torch op.

The fingerprint is read inside the scope that is measured, between backward and the optimizer. A torch op there would be
recorded and might allocate; the bytes are therefore read through numpy views of the storages.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a dense CPU tensor's content in logical order."""
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    if tensor.numel() == 0:
        return b""
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = np.frombuffer(raw, dtype=np.dtype(f"V{itemsize}"), offset=tensor.storage_offset() * itemsize)
    strides = [stride * itemsize for stride in tensor.stride()]
    return np.lib.stride_tricks.as_strided(flat, shape=tuple(tensor.shape), strides=strides).tobytes()


def digest(named_tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return the SHA-256 over names, shapes, dtypes and contents."""
    sha = hashlib.sha256()
    for name, tensor in named_tensors:
        sha.update(name.encode())
        if tensor is None:
            sha.update(b"none")
            continue
        sha.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def gradients_digest(model: nn.Module) -> str:
    """Return the fingerprint of every gradient."""
    return digest((name, parameter.grad) for name, parameter in model.named_parameters())


def state_digest(model: nn.Module) -> str:
    """Return the fingerprint of every parameter and buffer (batch-norm statistics included)."""
    return digest([*model.named_parameters(), *model.named_buffers()])


def random_state_digest() -> str:
    """Return the fingerprint of the CPU generator's state."""
    return hashlib.sha256(tensor_bytes(torch.get_rng_state())).hexdigest()
