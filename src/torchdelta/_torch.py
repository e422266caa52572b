"""The only file that touches private torch APIs.

Checked on torch 2.13.0 (CPU); written for 2.11 to 2.14. Every name here has a contract test in `tests/test_torch_contract.py`, so that a torch
release that changes one of them fails there, by name, and not somewhere in the runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

# [Note: storages are known by address]
# `Tensor.untyped_storage()` makes a Python object that the storage keeps for ever, and which counts as one of its holders (torch 2.13). The
# autograd engine accumulates gradients in place only where the storage has ONE holder, so looking at a gradient's storage object would turn
# an in-place addition into an allocation. `_storage_address` gives the same key as `UntypedStorage._cdata` without making the object.
storage_address: Callable[[torch.Tensor], int] = torch._C._storage_address
storage_num_holders: Callable[[int], int] = torch._C._storage_Use_Count

NoDispatch = torch._C._DisableTorchDispatch
NoFunction = torch._C.DisableTorchFunction
BelowAutograd = torch._C._AutoDispatchBelowAutograd
ExcludeKeys = torch._C._ExcludeDispatchKeyGuard
AUTOCAST_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastXPU)
)

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The C functions below `_python_dispatch._push_mode` and `_pop_mode`, which ask about infra modes first: twice a node, that shows.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
mode_stack: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack

OpOverload = torch._ops.OpOverload

# The code of the frame in which a module runs its forward, hooks included; its local `self` is the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__


def pop_mode() -> Any:  # noqa: ANN401 - whatever mode is on top
    """Take the top mode off this thread's stack and return it."""
    return torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> Any:  # noqa: ANN401 - whatever mode is on top
    """Return the top mode of this thread's stack, or None."""
    height = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(height - 1) if height else None


def storage_at(address: int) -> torch.UntypedStorage:
    """Return the storage object of a living storage, by its address.

    The caller must know that the storage is alive (one of its tensors is, or is just dying): a dead address is undefined behaviour.
    """
    return torch.UntypedStorage._new_with_weak_ptr(address)


class Quietly:
    """Run the library's own tensor work unseen: no dispatch mode, no function mode, no autograd, no autocast, no grad mode.

    `grad` is the grad mode inside, for kernels that read it (an LSTM returns no workspace without it). A fresh object is wanted for each use.
    """

    __slots__ = ("_guards", "_was")

    def __enter__(self) -> None:
        self._was = torch.is_grad_enabled()
        self._guards = (NoDispatch(), NoFunction(), BelowAutograd(), ExcludeKeys(AUTOCAST_KEYS))
        for guard in self._guards:
            guard.__enter__()
        set_grad_enabled(False)

    def __exit__(self, *exc: object) -> None:
        set_grad_enabled(self._was)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


@contextlib.contextmanager
def without_mode(mode: object) -> Iterator[bool]:
    """Take one dispatch mode off this thread's stack for a while; modes of others above it stay where they are. Yields whether it was on."""
    above: list[Any] = []
    stack = mode_stack()
    found = mode in stack
    if found:
        while True:
            top = pop_mode()
            if top is mode:
                break
            above.append(top)
        for other in reversed(above):
            push_mode(other)
    try:
        yield found
    finally:
        if found:
            kept: list[Any] = []
            for _ in above:
                kept.append(pop_mode())
            push_mode(mode)
            for other in reversed(kept):
                push_mode(other)


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Take all default saved-tensor hooks off this thread for a while (innermost first) and put them back in order."""
    taken: list[tuple[Any, Any]] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def patch_run_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the one Python door to the autograd engine by `make(original)`; returns what undoes it.

    `Tensor.backward`, `autograd.backward`, `autograd.grad` and reentrant checkpointing all pass through `_engine_run_backward`.
    """
    original = torch.autograd.graph._engine_run_backward
    replacement = make(original)
    torch.autograd.graph._engine_run_backward = replacement
    torch.autograd._engine_run_backward = replacement

    def undo() -> None:
        torch.autograd.graph._engine_run_backward = original
        torch.autograd._engine_run_backward = original

    return undo


def patch_functorch_guard(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the context in which `torch.func` transforms forbid saved-tensor hooks by `make(original)`; returns what undoes it."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    replacement = make(original)
    torch.autograd.graph.disable_saved_tensors_hooks = replacement

    def undo() -> None:
        torch.autograd.graph.disable_saved_tensors_hooks = original

    return undo


def patch_compiled_call(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the function through which AOTAutograd calls a compiled region by `make(original)`; returns what undoes it.

    Importing that module costs a second, so the patch waits until somebody else imported it: without `torch.compile` there is nothing to do.
    """
    import sys  # noqa: PLC0415 - only here

    module = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    if module is None or not hasattr(module, "call_func_at_runtime_with_args"):
        return lambda: None
    original = module.call_func_at_runtime_with_args
    module.call_func_at_runtime_with_args = make(original)

    def undo() -> None:
        module.call_func_at_runtime_with_args = original

    return undo


def numeric_environment() -> tuple[Any, ...]:
    """Return the global settings that kernels read besides their arguments: a replay runs under the recorded ones."""
    return (
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def set_numeric_environment(environment: tuple[Any, ...]) -> None:
    """Set what `numeric_environment` returned; the number of threads only where it differs (it is slow to set)."""
    dtype, mkldnn, deterministic, precision, num_threads = environment
    torch.set_default_dtype(dtype)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_deterministic_algorithms(deterministic, warn_only=torch._C._get_deterministic_algorithms_warn_only())
    torch._C._set_float32_matmul_precision(precision)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def input_sizes_bytes(node: Any) -> int:  # noqa: ANN401 - autograd nodes have no public type
    """Return the bytes of all gradients that flow into an autograd node (`_input_metadata`: shape and dtype of each)."""
    total_bytes = 0
    for metadata in getattr(node, "_input_metadata", None) or ():
        count = 1
        for length in metadata.shape:
            count *= int(length)
        total_bytes += count * metadata.dtype.itemsize
    return total_bytes


conj: Callable[[torch.Tensor], torch.Tensor] = torch._conj
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view


def _fake() -> tuple[Any, Any]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: PLC0415 - 0.2 s, and only an impossible budget needs it

    return FakeTensor, FakeTensorMode


def __getattr__(name: str) -> Any:  # noqa: ANN401 - module attribute
    if name in {"FakeTensor", "FakeTensorMode"}:
        return _fake()[name == "FakeTensorMode"]
    raise AttributeError(name)


def fake_view(mode: Any, tensor: torch.Tensor, device_type: str) -> torch.Tensor:  # noqa: ANN401 - a FakeTensorMode
    """Return a meta tensor as a fake tensor on a device; they share the (memory-less) storage."""
    return _fake()[0](mode, tensor, torch.device(device_type))
