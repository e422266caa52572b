"""Interrupts: Ctrl-C, and every other signal that Python code answers, waits while the runtime's books are open.

[Note: interrupts]
Python runs signal handlers between two bytecodes of the main thread, wherever that is, and the usual one raises
KeyboardInterrupt there. In the middle of an eviction or of an op's bookkeeping that would leave a count, a holder or a
record divided, and the next step could read the wrong content; in a destructor or the callback of a weak reference
Python would swallow the exception, and with it the Ctrl-C.

So all that the runtime does is done in *sections*, which nest. While a scope is open, the handlers that were installed
when it opened are wrapped: a signal that arrives in a section is noted, and handled as soon as the outermost section
ends, an op later at most. A destructor cannot raise, and is known by its code, since it may be interrupted before its
section has begun: there a helper thread sends the signal once more, a millisecond later. A signal that comes a second
time before the first was handled is handled at once: somebody is pressing Ctrl-C because a copy hangs, and wants out at
any price.

Only the main thread ever runs handlers, so only its sections count; those of other threads are never interrupted.
Handlers that are installed while a scope is open are left as they are.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from torchdelta.runtime import faults

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_P = ParamSpec("_P")
_T = TypeVar("_T")

_RETRY_S: Final = 0.001
_NOT_MAIN: Final = -1
_get_ident = threading.get_ident


class _Sections:
    """The sections of the main thread. Mutable; one for the process."""

    __slots__ = ("depth", "destructors", "main_id", "num_scopes", "pending", "wrapped")

    def __init__(self) -> None:
        self.main_id = threading.main_thread().ident
        self.depth = 0
        self.destructors: set[CodeType] = set()
        self.num_scopes = 0
        self.pending: dict[int, _Deferring] = {}
        self.wrapped: dict[int, _Deferring] = {}


class _Deferring:
    """A signal handler that waits for the end of the outermost section."""

    __slots__ = ("original",)

    def __init__(self, original: Callable[[int, FrameType | None], Any]) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if (
            (_sections.depth or _is_in_destructor(frame))
            and number not in _sections.pending
            and not faults.is_disabled("interrupts")
        ):
            _sections.pending[number] = self
            if not _sections.depth:
                _send_later()
            return None
        if not _is_in_destructor(frame):  # there it would be swallowed: it is sent once more
            _sections.pending.pop(number, None)
        depth, _sections.depth = _sections.depth, 0  # an exception may come between a section's end and the note of it
        answer = self.original(number, frame)
        _sections.depth = depth
        return answer


_sections = _Sections()


def _is_in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _sections.destructors:
            return True
        frame = frame.f_back
    return False


def enter() -> int:
    """Begin a section. Returns what `leave` wants to know; call that in a `finally`."""
    if _get_ident() != _sections.main_id:
        return _NOT_MAIN
    before = _sections.depth
    _sections.depth = before + 1
    return before


def leave(before: int) -> None:
    """End a section; after the outermost one, handle what came meanwhile, which may raise."""
    if before >= 0:
        _sections.depth = before
        if _sections.pending and not before:
            _handle()


def leave_unraising(before: int) -> None:
    """End a section in a destructor, where nothing may be raised."""
    if before >= 0:
        _sections.depth = before
        if _sections.pending and not before:
            _send_later()


def destructor(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a destructor, or the callback of a weak reference, whose body is one section."""
    _sections.destructors.add(function.__code__)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return function


_sections.destructors.update((enter.__code__, leave_unraising.__code__))


def shielded(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function a section."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        outer = enter()
        try:
            return function(*args, **kwargs)
        finally:
            leave(outer)

    return call


def call_outside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call what is not the runtime's own (the engine, with the user's hooks) from inside a section: interruptible."""
    if _get_ident() != _sections.main_id:
        return function(*args, **kwargs)
    depth = _sections.depth
    try:
        _sections.depth = 0
        if _sections.pending:
            _handle()
        return function(*args, **kwargs)
    finally:
        _sections.depth = depth  # first of all: a call before this could be interrupted


def start() -> None:
    """Wrap the handlers that are installed; a scope opens. Does nothing on other threads than the main one."""
    if _get_ident() != _sections.main_id:
        return
    _sections.num_scopes += 1
    if _sections.num_scopes > 1:
        return
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _Deferring):
            wrapper = _sections.wrapped[number] = _Deferring(handler)
            signal.signal(number, wrapper)


def stop() -> None:
    """Put the handlers back where they still are ours; a scope closes."""
    if _get_ident() != _sections.main_id:
        return
    if not _sections.num_scopes:
        return
    _sections.num_scopes -= 1
    if not _sections.num_scopes:
        _unwrap()


def _unwrap() -> None:
    for number, wrapper in _sections.wrapped.items():
        if signal.getsignal(number) is wrapper:
            signal.signal(number, wrapper.original)
    _sections.wrapped.clear()


def _in_child() -> None:
    """Begin anew in a forked child: the thread that forked is the main one, and no scope is open there."""
    if _get_ident() != _sections.main_id:
        _sections.main_id = _get_ident()
        _sections.depth = 0
    _sections.pending.clear()  # they were the parent's
    _sections.num_scopes = 0
    _unwrap()


os.register_at_fork(after_in_child=_in_child)


def _handle() -> None:
    while True:
        try:
            number, handler = _sections.pending.popitem()
        except KeyError:  # none left, or a helper thread has taken it
            return
        handler.original(number, sys._getframe())


def _send_later() -> None:
    with contextlib.suppress(RuntimeError):  # no more threads: it stays, for the next section to handle
        _thread.start_new_thread(_send_again, ())


def _send_again() -> None:
    time.sleep(_RETRY_S)
    while True:
        try:
            number, _ = _sections.pending.popitem()  # gone first: else it would count as the second time
        except KeyError:
            return
        _thread.interrupt_main(signal.Signals(number))
