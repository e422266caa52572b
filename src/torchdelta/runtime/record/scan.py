"""Finds the storages that exist before a scope opens: parameters, gradients, optimizer states, inputs.

[Note: gradients of other threads]
The engine replaces a leaf's `.grad` without holding the GIL, and `p.grad = None` releases the GIL midway: reading the
gradient of another thread's parameter at that moment crashes the process. So gradients are read only while every other
thread waits inside the standard library, or runs code of this package (its copy threads set no gradients) or of an
installed package other than torch. A thread that trains has torch or the user's program on its stack (a sleeping thread
of the program looks the same). The read is one C call that keeps the GIL; between checking the threads and that call a
switch is still possible, for a few instructions. Gradients that are not read count from their first use on, which is
logged.

[Note: objects of other threads]
`gc.get_objects()` also returns objects that other threads are still building. Holding a reference to a tuple that is
being filled makes it impossible to resize, which raises SystemError in the other thread (CPython issue 59313). Every
object refers to its class, so `gc.get_referrers` of the tensor classes is used: it visits all objects but returns no
others.
"""

from __future__ import annotations

import gc
import logging
import operator
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from torchdelta._torch.storages import storage_behind
from torchdelta._torch.tensors import is_trained_leaf, storage_of
from torchdelta.runtime.state.instances import subclasses_of
from torchdelta.runtime.state.kinds import runs_own_ops
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.state.outside_memory import is_outside_storage
from torchdelta.runtime.state.storages import memory_address

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["count_tensors", "others_may_train", "scan_storages"]

Others: TypeAlias = Literal["all", "parameters", "none"]

_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")  # it may lie inside the former
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])  # installed in editable mode, it lies outside of the installed packages
_logger = logging.getLogger("torchdelta")
skipped_kinds: set[tuple[str, str]] = set()  # (tensor class, error class) pairs that were logged already
_gradient_of = operator.attrgetter("grad")


def scan_storages(ledger: Ledger, *, others: Others = "all") -> int:
    """Count the storage of every tensor known to the garbage collector. Return how many bytes were found.

    Args:
        ledger: Learns of the storages.
        others: Whose memory counts beside what this thread has allocated: that of "all" tensors (of other threads,
            NumPy, mapped files), that of "parameters" and of mapped files, or "none". What is left out counts once an
            op uses it.

    Classes are compared by `type(o)`: `isinstance` would run `__class__` properties of lazy objects. Tensors that the
    collector does not list (after `gc.freeze()`, or held by C++ alone) count from their first use on. A leaf's `.grad`
    is held by C++, so it is read from the leaf.
    """
    before_bytes = ledger.usage.live_bytes
    leaves: list[torch.Tensor] = []
    for tensor in _tensors():
        kind = type(tensor)
        try:
            if kind is not torch.Tensor and kind is not torch.nn.Parameter and runs_own_ops(kind):
                _count_inner(ledger, tensor)
            elif others == "all" or (others == "parameters" and _may_be_a_models(tensor)) or _is_ours(ledger, tensor):
                _count(ledger, tensor, leaves)
        except Exception as error:  # noqa: BLE001 - any tensor of the process, in any state, even half built
            _skip(kind, error)
    for gradient in _gradients_of(leaves):
        if gradient is not None and gradient.layout is torch.strided:
            storage = storage_of(gradient)
            if storage is not None:
                ledger.observing.observer.on_found(ledger.know(storage), gradient, "gradient")
    return ledger.usage.live_bytes - before_bytes


def count_tensors(device: torch.device) -> int:
    """Return the bytes of the tensors on a device that a scope opened now would find."""
    ledger = Ledger(device)
    try:
        return scan_storages(ledger)
    finally:
        ledger.forget()


def _count(ledger: Ledger, tensor: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return
    record = ledger.know(storage_behind(tensor))
    ledger.observing.observer.on_found(record, tensor)
    if isinstance(tensor, torch.nn.Parameter):
        record.is_outside = False  # also where it is seen through `.data`
    if is_trained_leaf(tensor):
        leaves.append(tensor)


def _is_ours(ledger: Ledger, tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage is known, or the counter counts its memory anyway."""
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return False
    if ledger.find(tensor) is not None:
        return True
    storage = storage_behind(tensor)
    counter = ledger.usage.counter
    if counter is None or storage.device != ledger.device:
        return storage.device.type != "cpu"
    address = memory_address(storage)
    return address != 0 and counter.owns(address)


def _may_be_a_models(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, another trained leaf, or part of a mapped file, as a checkpoint's."""
    if isinstance(tensor, torch.nn.Parameter) or is_trained_leaf(tensor):
        return True
    if isinstance(tensor, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return False
    storage = storage_behind(tensor)
    return not storage.resizable() and not is_outside_storage(storage)


def _skip(kind: type, error: Exception) -> None:
    """Log, once for each tensor class and error class, that a tensor could not be counted."""
    key = (kind.__qualname__, type(error).__name__)
    if key not in skipped_kinds:
        skipped_kinds.add(key)
        first_line = str(error).partition("\n")[0]
        _logger.info(
            "skipped a tensor of class %s that cannot be read (%s: %s): its memory counts from its first use on",
            *key,
            first_line,
        )


def _tensors() -> list[torch.Tensor]:
    """Return all tensors that the collector lists; see [Note: objects of other threads]."""
    kinds = subclasses_of(torch.Tensor)
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def _gradients_of(leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    is_collecting = gc.isenabled()
    gc.disable()  # a finalizer would let other threads run in the middle of the C call
    try:
        if not others_may_train():
            try:
                return list(map(_gradient_of, leaves))
            except Exception as error:  # noqa: BLE001 - a subclass may define `grad` itself
                _skip(torch.Tensor, error)
                plain = [leaf for leaf in leaves if type(leaf) in {torch.Tensor, torch.nn.Parameter}]
                return list(map(_gradient_of, plain))
        if leaves:
            _logger.info("another thread may be training: existing gradients count from their first use on")
        return []
    finally:
        if is_collecting:
            gc.enable()


def others_may_train() -> bool:
    """Return whether another thread may be setting gradients now; see [Note: gradients of other threads]."""
    this_thread = threading.get_ident()
    return any(thread != this_thread and _may_train(top) for thread, top in sys._current_frames().items())


def _may_train(top: FrameType) -> bool:
    path = top.f_code.co_filename
    if path.startswith(_TORCH):
        return True
    if path.startswith((_LIBRARY, "<frozen")) and not path.startswith(_INSTALLED):
        return False
    frame: FrameType | None = top
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_TORCH) or not path.startswith((_LIBRARY, _INSTALLED, _OWN, "<frozen")):
            return True
        frame = frame.f_back
    return False


def _count_inner(ledger: Ledger, tensor: torch.Tensor) -> None:
    ledger.know_inner(tensor)
    try:
        if is_trained_leaf(tensor) and not others_may_train() and tensor.grad is not None:
            ledger.know_inner(tensor.grad)
    except Exception:  # noqa: BLE001 - runs the subclass's own code, on half-built objects too
        return
