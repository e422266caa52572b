"""What is replaced in torch while a session runs: on with the first, off with the last, idle on threads without one."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from torchdelta._torch import (
    graph_task_id,
    mode_stack,
    patch_compiled_call,
    patch_fsdp_backward,
    patch_functorch_guard,
    patch_run_backward,
    pop_mode,
    push_mode,
    top_mode,
    without_mode,
    without_saved_hooks,
)
from torchdelta.runtime.current import current_session
from torchdelta.runtime.interrupts import call_outside, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["leave_child", "patch", "unpatch"]

_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_num_sessions = 0


def leave_child() -> None:
    """Make a new lock in a forked child: the old one may be held by a thread that the child lacks."""
    global _lock  # noqa: PLW0603 - the child has one thread
    _lock = threading.Lock()


def patch() -> None:
    """Put the patches on for one more session: all of them, or none where one fails."""
    global _num_sessions  # noqa: PLW0603 - guarded by the lock
    with _lock:
        if _num_sessions == 0:
            try:
                _undo.append(patch_run_backward(_make_run_backward))
                _undo.append(patch_functorch_guard(_make_functorch_guard))
                _undo.append(patch_compiled_call(_make_compiled_call))
                _undo.append(patch_fsdp_backward(_make_fsdp_backward))
            except BaseException:
                _take_off()
                raise
        _num_sessions += 1


def unpatch() -> None:
    """Take them off again when no session is left."""
    global _num_sessions  # noqa: PLW0603 - guarded by the lock
    with _lock:
        _num_sessions -= 1
        if _num_sessions == 0:
            _take_off()


def _take_off() -> None:
    while _undo:
        _undo.pop()()


def _make_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None or session.recorder not in mode_stack():  # off inside torch.func transforms
            return original(outputs, *args, **kwargs)
        if session.recorder.is_off():
            with without_mode(session.recorder):
                return original(outputs, *args, **kwargs)
        return session.backward.run(original, outputs, *args, **kwargs)

    return run_backward


def _make_functorch_guard(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.func.grad` and its kin refuse to run under saved-tensor hooks.

    Inside them the scope is off, and what they make is kept.
    """

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(message: str) -> Any:
        session = current_session()
        if session is None:
            with original(message):
                yield
            return
        with without_saved_hooks(), without_mode(session.recorder), original(message):
            yield

    return disable_saved_tensors_hooks


def _make_compiled_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled region is one opaque op.

    Its kernels write buffers that no dispatch mode sees, so the recorder is off inside.
    """

    def call_compiled(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return original(*args, **kwargs)
        return session.compiled.call(original, *args, **kwargs)

    return call_compiled


def _make_fsdp_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP gathers and reduces between the nodes of a backward, where the recorder is off: it is on for that."""

    @shielded
    @functools.wraps(original)
    def step_of_backward(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None or graph_task_id() == -1 or session.recorder in mode_stack():
            return original(*args, **kwargs)
        push_mode(session.recorder)
        try:
            return call_outside(original, *args, **kwargs)
        finally:
            if top_mode() is session.recorder:
                pop_mode()

    return step_of_backward
