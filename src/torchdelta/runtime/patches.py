"""Replaces functions of torch from the first session's start to the last one's stop; no effect on other threads.

[Note: the end of inference mode]
`torch.inference_mode` notes all dispatch keys of the thread when it begins, and puts them back when it ends. Recording
may pause or resume inside of it: an optimizer steps there, or the budget's limit is passed. The key by which ops reach
dispatch modes would then no longer agree with their stack: without a mode the next op fails, and with one the recorder
sees no op. The gate's key likewise. So the keys of both stay as they are right before the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.compiled import keep_out_of_compiled_code, patch_compiled_call, patch_compiled_functions
from torchdelta._torch.doors import (
    patch_fsdp_backward,
    patch_functorch_guard,
    patch_inference_mode,
    patch_raw_results,
    patch_raw_writes,
    patch_run_backward,
    patch_saving,
    patch_swap_tensors,
)
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import (
    keeping_mode_keys,
    mode_stack,
    pop_mode,
    push_mode,
    top_mode,
    without_mode,
    without_saved_hooks,
)
from torchdelta._torch.tensors import identity_of
from torchdelta.notices import warn_once
from torchdelta.runtime.current import current_session
from torchdelta.runtime.interrupts import call_outside, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta._torch.compiled import InputsOf
    from torchdelta.runtime.current import Running

__all__ = ["leave_child", "num_sessions", "patch", "unpatch"]

_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_num_sessions = 0
_opened_in = os.getpid()


def leave_child() -> None:
    """Make a new lock in a forked child: the old one may be held by a thread that the child lacks."""
    global _lock  # noqa: PLW0603 - the child has one thread
    _lock = threading.Lock()


def patch() -> None:
    """Install the patches for one more session: all of them, or none if one fails."""
    global _num_sessions, _opened_in  # noqa: PLW0603 - guarded by the lock
    with _lock:
        if _num_sessions == 0:
            try:
                _undo.append(patch_run_backward(_make_run_backward))
                _undo.append(patch_functorch_guard(_make_functorch_guard))
                _undo.append(patch_compiled_call(_make_compiled_call))
                _undo.append(patch_compiled_functions(_begin_compiled_function))
                _undo.append(keep_out_of_compiled_code("torchdelta"))
                _undo.append(patch_fsdp_backward(_make_fsdp_backward))
                _undo.append(patch_swap_tensors(_make_swap_tensors))
                _undo.append(patch_saving(_make_check_of_file))
                _undo.append(patch_raw_writes(_make_raw_write))
                _undo.append(patch_raw_results(_make_raw_results))
                _undo.append(patch_inference_mode(_make_end_of_inference_mode))
            except BaseException:
                _remove_patches()
                raise
            _opened_in = os.getpid()
        _num_sessions += 1


def num_sessions() -> int:
    """Return how many sessions, of all threads, share the patches."""
    return _num_sessions


def unpatch() -> None:
    """Remove the patches when no session is left."""
    global _num_sessions  # noqa: PLW0603 - guarded by the lock
    with _lock:
        _num_sessions -= 1
        if _num_sessions == 0:
            _remove_patches()


def _remove_patches() -> None:
    while _undo:
        _undo.pop()()


def _make_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None and graph_task_id() == -1:
            _warn_of_other_training()
        if session is None:
            return original(outputs, *args, **kwargs)
        try:
            return run(session, outputs, *args, **kwargs)
        finally:
            if session.recorder.is_over:  # a hook has stopped it, and the engine has put back what that took away
                session.leave_backward()

    def run(session: Running, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if session.pause.is_on:
            return session.pause.run_backward(session.backward.run, original, outputs, *args, **kwargs)
        if session.partial.is_on:
            return session.partial.run_backward(original, outputs, *args, **kwargs)
        if session.recorder not in mode_stack():
            return session.backward.run_nested(original, outputs, *args, **kwargs)
        if session.device.is_off():
            with without_mode(session.recorder):
                return session.backward.run_nested(original, outputs, *args, **kwargs)
        if session.recorder.only_counts:
            return session.transforms.run_backward(original, outputs, *args, **kwargs)
        session.pause.on_backward_start()
        return session.backward.run(original, outputs, *args, **kwargs)

    return run_backward


def _warn_of_other_training() -> None:
    """Log once that a backward runs outside of every scope while this process, or its parent, has one."""
    if os.getpid() != _opened_in:
        warn_once(
            "a forked process trains: the MemoryBudget of its parent process does not apply here; "
            "start a MemoryBudget in this process, or start this process by 'spawn' under `torchdelta run`"
        )
    else:
        warn_once(
            "a backward runs on a thread that did not start a MemoryBudget, so it has no budget: train on the thread "
            "that started the MemoryBudget, or start one on this thread"
        )


def _make_functorch_guard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the guard by which `torch.func.grad` and related transforms refuse to run under saved-tensor hooks.

    Inside them ops are counted only. See [Note: ops inside transforms] in transforms.py.
    """

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(message: str) -> Any:
        session = current_session()
        if session is None:
            with original(message):
                yield
            return
        session.partial.end("a transform runs")
        session.pause.forbid()
        if session.pause.is_on:  # it ends with the forward that is under way
            with without_saved_hooks(), original(message):
                yield
            return
        with session.transforms.counting_only(), original(message):
            yield

    return disable_saved_tensors_hooks


def _make_compiled_call(original: Callable[..., Any], inputs_of: InputsOf) -> Callable[..., Any]:
    """Route calls of compiled regions through `CompiledRegions`."""

    def call_compiled(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None:
            return original(*args, **kwargs)
        _record_as_a_whole(session)
        with session.backward.python_writes.off():
            return session.compiled.call(original, inputs_of(args, kwargs), args, kwargs)

    return call_compiled


@shielded
def _begin_compiled_function(function: Any, inputs: Any) -> Callable[[], None] | None:
    """Have the recorder on the stack before a compiled function is called, and leave it there; make room."""
    session = current_session()
    if session is None:
        return None
    session.compiled.end_survey()
    _record_as_a_whole(session)
    return session.compiled.begin_function(function, inputs)


def _record_as_a_whole(session: Running) -> None:
    session.partial.end("compiled code runs")
    session.traces.stop_waiting()
    session.pause.forbid()


def _make_fsdp_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the recorder on for FSDP's gathers and reductions, which run between the nodes of a backward."""

    @shielded
    @functools.wraps(original)
    def step_of_backward(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None or graph_task_id() == -1 or session.pause.is_on or session.recorder in mode_stack():
            return original(*args, **kwargs)
        push_mode(session.recorder)
        try:
            return call_outside(original, *args, **kwargs)
        finally:
            if top_mode() is session.recorder:
                pop_mode()

    return step_of_backward


def _make_swap_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the runtime's weak references from two tensors before they exchange what they are."""

    @shielded
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        session = current_session()
        if session is None:
            original(t1, t2)
        else:
            _swap_tensors(session, original, t1, t2)

    return swap_tensors


def _swap_tensors(session: Any, original: Callable[..., None], t1: torch.Tensor, t2: torch.Tensor) -> None:
    if session.survey is not None:
        raise session.take_error()  # the program would be left with what the survey made
    session.backward.headroom.forget(t1, t2)
    session.partial.leave_tape()  # torch refuses tensors with weak references, and the tape has some
    session.partial.forget_leaves()
    session.ledger.watch_storages_of(t1, t2)
    identity = identity_of(t1)
    try:
        original(t1, t2)
    finally:
        if identity_of(t1) != identity:
            session.ledger.exchange_witnesses(t1, t2)


def _make_check_of_file(original: Callable[..., None]) -> Callable[..., None]:
    """End a survey before `torch.save` opens its file, which would replace a good one by one without content."""

    def check_save_filelike(file: Any) -> None:
        session: Any = current_session()
        if session is not None and session.survey is not None:
            raise session.take_error()
        original(file)

    return check_save_filelike


def _make_raw_write(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record a write that is no op."""

    @shielded
    def write(written: Any, *args: Any, **kwargs: Any) -> Any:
        session: Any = current_session()
        if session is None or session.pause.is_on:
            return call_outside(original, written, *args, **kwargs)
        if session.survey is not None and not isinstance(written, torch.UntypedStorage):
            raise session.take_error()  # it would write a real tensor, which a survey leaves as it is
        with session.raw_writes.recorded(written):
            return call_outside(original, written, *args, **kwargs)

    return write


def _make_raw_results(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for a function that makes its results with ops and then writes them without one.

    So they cannot be recomputed.
    """

    @shielded
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        results = call_outside(original, *args, **kwargs)
        session: Any = current_session()
        if session is not None and session.survey is None and not session.pause.is_on:
            for result in results:
                with session.raw_writes.recorded(result):
                    pass
        return results

    return call


def _make_end_of_inference_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the keys of dispatch modes and of the gate, also where the scope was stopped inside.

    See [Note: the end of inference mode].
    """

    @shielded  # recording does not resume in between
    @functools.wraps(original)
    def end_inference_mode(*args: Any) -> Any:
        with keeping_mode_keys():
            return original(*args)

    return end_inference_mode


def _leave_child() -> None:
    """Remove the session from a forked child, such as a DataLoader worker, without any effect on the parent.

    The child inherits the dispatch mode, hooks and ledger, but neither the tier's threads nor its file: without this a
    worker's tensors would be counted in its copy of the ledger, and its swaps would fail once that was full.
    The patches stay: without a session they do nothing.
    """
    leave_child()
    session = current_session()
    if session is not None:
        session.leave_child()


os.register_at_fork(after_in_child=_leave_child)
