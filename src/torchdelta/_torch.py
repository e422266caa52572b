"""The only file that touches private torch APIs, together with `_torch_device.py` and `_torch_symbolic.py`.

Checked on torch 2.13.0 (CPU); written for 2.11 to 2.14. Every name here has a contract test in
`tests/torch_contract`, so that a torch release that changes one of them fails there, by name, and not somewhere
in the runtime.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

# [Note: storages are known by address]
# `Tensor.untyped_storage()` makes a Python object that the storage keeps for ever, and which counts as one of its
# holders (torch 2.13). The autograd engine accumulates gradients in place only where the storage has ONE holder, so
# looking at a gradient's storage object would turn an in-place addition into an allocation. `_storage_address` gives
# the same key as `UntypedStorage._cdata` without making the object.
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


_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def is_autocast_outside(device_type: str) -> bool:
    """Say whether autocast is on where the running op was called; inside a dispatch mode it always looks off."""
    if device_type not in _AUTOCAST_KEYS:
        return False
    with torch._C._RestorePythonTLSSnapshot():
        return torch.is_autocast_enabled(device_type)


def autocast_inside(device_type: str) -> Any:
    """Return a context in which autocast acts also inside a dispatch mode, if it is on outside."""
    return torch._C._SetExcludeDispatchKeyGuard(_AUTOCAST_KEYS[device_type], False)


# The name of the node that adds a gradient into a leaf's `.grad`.
ACCUMULATE = "torch::autograd::AccumulateGrad"
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

tensor_num_holders: Callable[[torch.Tensor], int] = torch.Tensor._use_count


def current_node() -> str:
    """Return the name of the autograd node that this thread's backward runs, or ran last; "" before the first."""
    node: Any = torch._C._current_autograd_node()
    return "" if node is None else node.name()


num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The C functions below `_python_dispatch._push_mode` and `_pop_mode`, which ask about infra modes first: twice a node,
# that shows.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
TorchDispatchMode = _python_dispatch.TorchDispatchMode
mode_stack: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack

_FAKE = torch._C._TorchDispatchModeKey.FAKE

OpOverload = torch._ops.OpOverload
is_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled

# The code of the frame in which a module runs its forward, hooks included; its local `self` is the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__


def pop_mode() -> Any:
    """Take the top mode off this thread's stack and return it."""
    return torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> Any:
    """Return the top mode of this thread's stack, or None."""
    height = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(height - 1) if height else None


def fake_mode() -> Any:
    """Return the fake-tensor mode that is on in this thread, or None."""
    return torch._C._get_dispatch_mode(_FAKE)


def storage_at(address: int) -> torch.UntypedStorage:
    """Return the storage object of a living storage, by its address.

    The caller must know that the storage is alive (one of its tensors is, or is just dying): a dead address is
    undefined behaviour.
    """
    return torch.UntypedStorage._new_with_weak_ptr(address)


def storage_over(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage that looks at memory which it does not own; the caller keeps that memory in place."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return storage


class Quietly:
    """Run the library's own tensor work unseen.

    No dispatch mode, no function mode, no autograd, no autocast, no grad mode.

    `grad` is the grad mode inside, for kernels that read it (an LSTM returns no workspace without it). A fresh object
    is wanted for each use.
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


def remove_mode(mode: object) -> None:
    """Take one dispatch mode off this thread's stack for good: the highest place where it stands, if any."""
    above: list[Any] = []
    if mode in mode_stack():
        while (top := pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            push_mode(other)


@contextlib.contextmanager
def without_mode(mode: object) -> Generator[bool]:
    """Take one dispatch mode off this thread's stack for a while; modes of others above it stay where they are.

    Yields whether it was on.
    """
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
            kept = [pop_mode() for _ in above]
            push_mode(mode)
            for other in reversed(kept):
                push_mode(other)


@contextlib.contextmanager
def without_saved_hooks() -> Generator[None]:
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


def remove_saved_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Take one pair of default saved-tensor hooks off this thread for good, wherever it stands."""
    above: list[tuple[Any, Any]] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top == (pack, unpack):
            break
        above.append(top)
    for other in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*other)


def patch_run_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the one Python door to the autograd engine by `make(original)`; returns what undoes it.

    `Tensor.backward`, `autograd.backward`, `autograd.grad` and reentrant checkpointing all pass through
    `_engine_run_backward`.
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
    """Replace the context in which `torch.func` transforms forbid saved-tensor hooks by `make(original)`.

    Returns what undoes it.
    """
    original = torch.autograd.graph.disable_saved_tensors_hooks
    replacement = make(original)
    torch.autograd.graph.disable_saved_tensors_hooks = replacement

    def undo() -> None:
        torch.autograd.graph.disable_saved_tensors_hooks = original

    return undo


def patch_storage_resize(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace `UntypedStorage.resize_`, by which FSDP frees and fills parameters, by `make(original)`.

    Returns what undoes it.
    """
    kind: Any = torch.UntypedStorage
    own = vars(kind).get("resize_")
    kind.resize_ = make(kind.resize_)

    def undo() -> None:
        if own is None:
            del kind.resize_  # it is inherited
        else:
            kind.resize_ = own

    return undo


_COMPILED_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls back right after a module was imported by somebody else."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - the import system's
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the others find it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _patch_when_imported(module_name: str, patch: Callable[[Any], Callable[[], None] | None]) -> Callable[[], None]:
    """Run `patch(module)` now if the module is there, else as soon as somebody imports it; returns what undoes it."""
    undos: list[Callable[[], None]] = []

    def run(module: Any) -> None:
        undo_one = patch(module)
        if undo_one is not None:
            undos.append(undo_one)

    waiting = _WhenImported(module_name, run)
    if module_name in sys.modules:
        run(sys.modules[module_name])
    else:
        sys.meta_path.insert(0, waiting)

    def undo() -> None:
        if waiting in sys.meta_path:
            sys.meta_path.remove(waiting)
        while undos:
            undos.pop()()

    return undo


def patch_compiled_call(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the two doors to compiled code by `make(original)`; returns what undoes it.

    The doors are `OptimizedModule.__call__` (a module that `torch.compile` returned) and the function through which
    AOTAutograd calls a compiled backward. Importing their modules costs a second, so where nobody has done it yet the
    patch waits for whoever does.
    """

    def patch_backward(module: Any) -> Callable[[], None] | None:
        original = getattr(module, "call_func_at_runtime_with_args", None)
        if original is None:
            return None
        module.call_func_at_runtime_with_args = make(original)

        def undo() -> None:
            module.call_func_at_runtime_with_args = original

        return undo

    def patch_module(module: Any) -> Callable[[], None] | None:
        kind = module.OptimizedModule
        original = kind.__call__
        kind.__call__ = make(original)

        def undo() -> None:
            kind.__call__ = original

        return undo

    undo_backward = _patch_when_imported(_COMPILED_RUNTIME, patch_backward)
    undo_module = _patch_when_imported("torch._dynamo.eval_frame", patch_module)

    def undo() -> None:
        undo_backward()
        undo_module()

    return undo


_FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP_STEPS_OF_BACKWARD = ("pre_backward", "post_backward", "finalize_backward")


def patch_fsdp_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what FSDP2 does between the nodes of a backward, to gather and to reduce, by `make(original)`.

    Returns what undoes it. FSDP is not imported for it.
    """

    def patch(module: Any) -> Callable[[], None] | None:
        kind = getattr(module, "FSDPParamGroup", None)
        originals = {
            name: vars(kind)[name] for name in FSDP_STEPS_OF_BACKWARD if kind is not None and name in vars(kind)
        }
        for name, original in originals.items():
            setattr(kind, name, make(original))

        def undo() -> None:
            for name, original in originals.items():
                setattr(kind, name, original)

        return undo

    return _patch_when_imported(_FSDP_GROUP, patch)


_region_codes: set[Any] = set()


def is_in_compiled_region() -> bool:
    """Say whether the running op comes from compiled code.

    A compiled function calls kernels that are dispatched among kernels that are not.

    Costs a walk up the stack, but only in a process that has compiled something.
    """
    if not getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0):
        return False
    if not _region_codes:
        module = sys.modules.get(_COMPILED_RUNTIME)
        _region_codes.update(_codes_named("runtime_wrapper", module))
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _region_codes:
            return True
        frame = frame.f_back
    return False


def _codes_named(name: str, module: Any) -> set[Any]:
    """Return the code objects of all functions of this name in a module, nested ones too: closures share them."""
    found: set[Any] = set()
    stack = (
        [thing.__code__ for thing in vars(module).values() if hasattr(thing, "__code__")] if module is not None else []
    )
    stack += [
        method.__code__
        for thing in (vars(module).values() if module is not None else ())
        if isinstance(thing, type)
        for method in vars(thing).values()
        if hasattr(method, "__code__")
    ]
    while stack:
        code = stack.pop()
        if code.co_name == name:
            found.add(code)
        stack.extend(constant for constant in code.co_consts if hasattr(constant, "co_consts"))
    return found


def input_sizes_bytes(node: Any) -> int:
    """Return the bytes of all gradients that flow into an autograd node (`_input_metadata`.

    Shape and dtype of each).
    """
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
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return FakeTensor, FakeTensorMode


def __getattr__(name: str) -> Any:
    if name in {"FakeTensor", "FakeTensorMode"}:
        return _fake()[name == "FakeTensorMode"]
    raise AttributeError(name)


def fake_mode_for_once() -> Any:
    """Return a fake-tensor mode that takes real tensors as well, and leaves nothing in torch's cache of its findings.

    That cache is never emptied.
    """
    mode = _fake()[1](allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def fake_view(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a meta tensor as a fake tensor on a device; the fake one keeps the other alive."""
    fake = _fake()[0](mode, tensor, device)
    fake._torchdelta_source = tensor  # it has a storage of its own: whoever holds the fake must hold what it stands for
    return fake
