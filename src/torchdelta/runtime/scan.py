"""Finds the storages that exist before a scope opens: parameters, gradients, optimizer states, inputs.

[Note: gradients of other threads]
The engine replaces a leaf's `.grad` without holding the interpreter's lock, and `p.grad = None` gives it back in its
middle: reading the gradient of another thread's parameter at that moment crashes the process. So they are read only
while every other thread waits for something in Python's own library, or consists of other packages' code alone; one
that trains is in torch, or in the program (where one that sleeps looks the same). They are read in one call of C, which
keeps the lock; between the look at the threads and that call a switch is still possible, for a few instructions. What
is not read counts from its first use on, and the log says so.

[Note: objects of other threads]
`gc.get_objects()` lists what other threads are still building: while somebody holds a reference, a tuple that is being
filled cannot grow any more, which is a SystemError over there (CPython issue 59313). An object refers to its class, so
the collector is asked for what refers to a class of tensors: it goes through all, but hands out no others.
"""

from __future__ import annotations

import gc
import logging
import operator
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from torchdelta.runtime.subclasses import count, runs_own_ops

if TYPE_CHECKING:
    from types import FrameType

    from torchdelta.runtime.ledger import Ledger

__all__ = ["scan_storages"]

_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")  # it may lie inside the former
_TORCH = str(Path(torch.__file__).parent)
_logger = logging.getLogger("torchdelta")
_gradient_of = operator.attrgetter("grad")


def scan_storages(ledger: Ledger) -> int:
    """Count every storage that a tensor known to the garbage collector holds. Returns how many bytes were found.

    Objects are asked by `type(o)`: `isinstance` would run `__class__` properties of lazy objects. Tensors that the
    collector does not list (after `gc.freeze()`, or held by C++ alone) count from their first use on; a leaf's `.grad`
    is held by C++ and is asked for.
    """
    before_bytes = ledger.live_bytes
    leaves: list[torch.Tensor] = []
    for tensor in _tensors():
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter and runs_own_ops(kind):
            _count_inner(ledger, tensor)
        else:
            _count(ledger, tensor, leaves)
    for gradient in _gradients_of(leaves):
        if gradient is not None and gradient.layout is torch.strided:
            record = ledger.know(gradient.untyped_storage())
            if ledger.trace is not None:
                ledger.trace.on_found(record, gradient, "gradient")
    return ledger.live_bytes - before_bytes


def _count(ledger: Ledger, tensor: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return
    record = ledger.know(tensor.untyped_storage())
    if ledger.trace is not None:
        ledger.trace.on_found(record, tensor)
    if tensor.is_leaf and tensor.requires_grad:
        leaves.append(tensor)


def _tensors() -> list[torch.Tensor]:
    """Return what the collector lists; see [Note: objects of other threads]."""
    kinds: set[type] = {torch.Tensor}
    new = [torch.Tensor]
    while new:
        new = [kind for base in new for kind in type.__subclasses__(base) if kind not in kinds]
        kinds.update(new)
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def _gradients_of(leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    is_collecting = gc.isenabled()
    gc.disable()  # a finalizer would let other threads run in the middle of the call of C
    try:
        if not _is_anybody_at_work():
            return list(map(_gradient_of, leaves))
        if leaves:
            _logger.info("another thread may be training: gradients that exist already count from their first use on")
        return []
    finally:
        if is_collecting:
            gc.enable()


def _is_anybody_at_work() -> bool:
    """Whether another thread may be setting gradients now; see [Note: gradients of other threads]."""
    me = threading.get_ident()
    return any(thread != me and _may_work(top) for thread, top in sys._current_frames().items())


def _may_work(top: FrameType) -> bool:
    path = top.f_code.co_filename
    if path.startswith(_TORCH):
        return True
    if path.startswith((_LIBRARY, "<frozen")) and not path.startswith(_INSTALLED):
        return False
    frame: FrameType | None = top
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_TORCH) or not path.startswith((_LIBRARY, _INSTALLED, "<frozen")):
            return True
        frame = frame.f_back
    return False


def _count_inner(ledger: Ledger, tensor: torch.Tensor) -> None:
    count(ledger, tensor)
    try:
        if tensor.is_leaf and tensor.requires_grad and not _is_anybody_at_work() and tensor.grad is not None:
            count(ledger, tensor.grad)
    except Exception:  # noqa: BLE001 - somebody's own code, half-built objects among them
        return
