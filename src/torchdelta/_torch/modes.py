"""What stands between a call and its kernel: dispatch modes, guards, autocast, saved-tensor hooks.

See `__init__.py` for the rules.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _python_dispatch

from torchdelta._torch.engine import set_grad_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

NoDispatch = torch._C._DisableTorchDispatch
NoFunction = torch._C.DisableTorchFunction
BelowAutograd = torch._C._AutoDispatchBelowAutograd
ExcludeKeys = torch._C._ExcludeDispatchKeyGuard
AUTOCAST_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastXPU)
)
# What acts between autograd and the kernels: autocast, and the gate (native/gate.cpp), which sees the ops of a program.
# In `torch.autograd.grad(is_grads_batched=True)`, another key refuses random ops.
_OTHER_KEYS = [key for key in map(torch._C._parse_dispatch_key, ("Fake", "VmapMode")) if key is not None]
_UNSEEN_BY = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _OTHER_KEYS), AUTOCAST_KEYS)
# By these an op reaches the modes of a thread's stack, or the gate; they are switched on and off with these.
_MODE_KEYS = [
    key for key in map(torch._C._parse_dispatch_key, ("Python", "PythonTLSSnapshot", "Fake")) if key is not None
]
_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def is_autocast_outside(device_type: str) -> bool:
    """Return whether autocast is on where the running op was called; inside a dispatch mode it always looks off."""
    if device_type not in _AUTOCAST_KEYS:
        return False
    with torch._C._RestorePythonTLSSnapshot():
        return torch.is_autocast_enabled(device_type)


def autocast_inside(device_type: str) -> Any:
    """Return a context in which autocast acts also inside a dispatch mode, if it is on outside."""
    return torch._C._SetExcludeDispatchKeyGuard(_AUTOCAST_KEYS[device_type], False)


def is_in_kernel() -> bool:
    """Return whether this thread is in a kernel below autograd; False in inference mode, and below a dispatch mode.

    The Python of a dispatch mode is below autograd as well. More keys are excluded there, and in the kernels below it.
    """
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    key = torch._C.DispatchKey
    is_below = is_excluded(key.AutogradFunctionality) and not is_excluded(key.Conjugate)
    return is_below and not torch.is_inference_mode_enabled()


def resolving_views() -> Any:
    """Return a context in which lazily conjugate and negative views are resolved also inside a dispatch mode."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The C functions below `_python_dispatch._push_mode` and `_pop_mode`, which ask about infra modes first: twice a node,
# that shows.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
TorchDispatchMode = _python_dispatch.TorchDispatchMode
mode_stack: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which Dynamo goes on with running compiled code.

    Without these two methods Dynamo stops doing so, permanently, and every op pays a Dynamo check.

    [Note: a mode that ends inside an op]
    While a mode handles an op, torch has taken it off the stack, and puts it back afterwards. So a mode cannot leave
    the stack there, as where a signal handler stops a budget. It sets `is_over` and lets every later op pass;
    `remove_ended_modes` takes it off the stack.
    """

    is_over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo then runs compiled code under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


FunctionMode = torch.overrides.TorchFunctionMode
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def top_function_mode() -> Any:
    """Return the top function mode of this thread's stack, or None."""
    height = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(height - 1) if height else None


def remove_function_mode(mode: object) -> None:
    """Take one function mode off this thread's stack: the highest place where it stands, if any."""
    height = torch._C._len_torch_function_stack()
    if not any(torch._C._get_function_stack_at(index) is mode for index in range(height)):
        return
    above: list[Any] = []
    while (top := pop_function_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        push_function_mode(other)


def pop_mode() -> Any:
    """Take the top mode off this thread's stack and return it."""
    return torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> Any:
    """Return the top mode of this thread's stack, or None."""
    height = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(height - 1) if height else None


class Quietly:
    """Run the library's own tensor work unseen.

    No dispatch mode, no function mode, no autograd, no autocast, no grad mode, no gate. No inference mode, as its
    tensors have no versions. No transform of `torch.func`, as it may forbid random ops.

    `grad` is the grad mode inside, for kernels that read it (an LSTM returns no workspace without it). A fresh object
    is wanted for each use.
    """

    __slots__ = ("_guards", "_was")

    def __enter__(self) -> None:
        self._was = torch.is_grad_enabled()
        outer: tuple[Any, ...] = ()
        if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            # They note the keys and put them back at the end. The guards below act as soon as they are constructed: if
            # one existed already, what it excludes would stay excluded.
            outer = (outside_inference_mode(), temporarily_clear_interpreter_stack())
            for guard in outer:
                guard.__enter__()
        self._guards: tuple[Any, ...] = (*outer, NoDispatch(), NoFunction(), BelowAutograd(), ExcludeKeys(_UNSEEN_BY))
        for guard in self._guards[len(outer) :]:
            guard.__enter__()
        set_grad_enabled(False)

    def __exit__(self, *exc: object) -> None:
        set_grad_enabled(self._was)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def outside_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """Return a context outside of inference mode; it does nothing where that is off."""
    return torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def keeping_mode_keys() -> Generator[None]:
    """Return a context after which ops reach the modes and the gate as they did when it began.

    See [Note: the end of inference mode] in runtime/patches.py.
    """
    is_included = torch._C._dispatch_tls_is_dispatch_key_included
    were_on = [is_included(key) for key in _MODE_KEYS]
    try:
        yield
    finally:
        for key, was_on in zip(_MODE_KEYS, were_on, strict=True):
            if is_included(key) != was_on:
                torch._C._dispatch_tls_set_dispatch_key_included(key, was_on)


def remove_mode(mode: object) -> None:
    """Take one dispatch mode off this thread's stack for good: the highest place where it stands, if any."""
    above: list[Any] = []
    if mode in mode_stack():
        while (top := pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            push_mode(other)


def position_of_mode(mode: object) -> int:
    """Return where a dispatch mode stands on this thread's stack, from the bottom; -1 if it is not there."""
    stack = mode_stack()
    return stack.index(mode) if mode in stack else -1


def insert_mode(mode: object, position: int) -> None:
    """Put a dispatch mode on this thread's stack, below those that stand at `position` and above."""
    above = [pop_mode() for _ in range(num_modes() - position)]
    push_mode(mode)
    for other in reversed(above):
        push_mode(other)


def enter_lowest(mode: TorchDispatchMode) -> None:
    """Enter a mode below all modes of this thread, except those that torch keeps apart (fake tensors).

    So it sees the ops that the program's modes make, whether they were entered earlier or will be later.
    """
    mode.__enter__()
    num_apart = sum(getattr(other, "_mode_key", None) is not None for other in mode_stack())
    if position_of_mode(mode) > num_apart:
        remove_mode(mode)
        insert_mode(mode, num_apart)


def leave_stack(mode: DispatchMode) -> None:
    """Exit a mode for good, which need not be the top one, if it is on the stack; the others stay.

    See [Note: a mode that ends inside an op].
    """
    mode.is_over = True
    if mode in mode_stack():
        remove_mode(mode)
        push_mode(mode)
        mode.__exit__(None, None, None)


def remove_ended_modes() -> None:
    """Take modes that are over off this thread's stack. See [Note: a mode that ends inside an op]."""
    for mode in mode_stack():
        if isinstance(mode, DispatchMode) and mode.is_over:
            remove_mode(mode)


@contextlib.contextmanager
def without_mode(mode: DispatchMode) -> Generator[bool]:
    """Take one dispatch mode off this thread's stack for a while; modes of others above it stay where they are.

    Yields whether it was on. It is not put back if it is over by then.
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
        if found and not mode.is_over:
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


def is_packing_by_others(pack: Callable[..., Any] | None) -> bool:
    """Return whether an op packs a tensor with saved-tensor hooks that a program has put over those with `pack`.

    Of a hook that is no Python code nothing shows when it runs: True as long as it is on top.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None or top[0] == pack:
        return False
    function = top[0]
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return code is None
