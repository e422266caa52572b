"""Finds the storages that exist before a scope opens: parameters, gradients, optimizer states, inputs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from torchdelta.runtime.subclasses import count, runs_own_ops

if TYPE_CHECKING:
    from torchdelta.runtime.ledger import Ledger


def scan_storages(ledger: Ledger) -> int:
    """Count every storage that a tensor known to the garbage collector holds. Returns how many bytes were found.

    Objects are asked by `type(o)`: `isinstance` would run `__class__` properties of lazy objects. Tensors that the
    collector does not list (after `gc.freeze()`, or held by C++ alone) count from their first use on; a leaf's `.grad`
    is held by C++ and is asked for.
    """
    before_bytes = ledger.live_bytes
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            _count(ledger, thing)
        elif issubclass(kind, torch.Tensor):
            if runs_own_ops(kind):
                _count_inner(ledger, thing)
            else:
                _count(ledger, thing)
    return ledger.live_bytes - before_bytes


def _count(ledger: Ledger, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return
    record = ledger.know(tensor.untyped_storage())
    if ledger.trace is not None:
        ledger.trace.on_found(record, tensor)
    if tensor.is_leaf and tensor.requires_grad:
        gradient = tensor.grad
        if gradient is not None and gradient.layout is torch.strided:
            record = ledger.know(gradient.untyped_storage())
            if ledger.trace is not None:
                ledger.trace.on_found(record, gradient, "gradient")


def _count_inner(ledger: Ledger, tensor: torch.Tensor) -> None:
    count(ledger, tensor)
    try:
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            count(ledger, tensor.grad)
    except Exception:  # noqa: BLE001 - somebody's own code, half-built objects among them
        return
