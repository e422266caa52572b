"""Delays signal handlers (Ctrl-C and every other signal handled in Python) while internal state is inconsistent.

[Note: interrupts]
Python runs a signal handler between two bytecodes of the main thread, wherever that thread is, and the usual handler of
Ctrl-C raises KeyboardInterrupt there. In the middle of an eviction or of an op's accounting, that exception would leave
a count, a reference or a record half updated, and the next step could read the wrong content. In a destructor or in the
callback of a weak reference, Python would discard the exception, and the Ctrl-C would be lost.

So all code of the runtime runs in *sections*, which nest. A scope wraps the signal handlers that are installed when it
starts. A signal that arrives in a section is recorded, and its handler runs when the outermost section ends, at most
one op later. A destructor must not raise. It needs no section, because its code object is recognized anywhere on the
stack: a signal that arrives in a destructor is sent again by a helper thread a millisecond later. If the same signal
arrives a second time before the first one was handled, the handler runs at once: the user presses Ctrl-C again because
a copy hangs, and the process must react even if internal state becomes inconsistent.

Python runs signal handlers on the main thread only: other threads are never interrupted, and only sections of the main
thread delay signals. A handler that is installed while a scope is active is not wrapped, except by `renew`.
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_P = ParamSpec("_P")
_T = TypeVar("_T")

_RETRY_S: Final = 0.001
_NOT_MAIN: Final = -1
_get_ident = threading.get_ident


class _Sections:
    """The state of the main thread's sections. Mutable; one for the process."""

    __slots__ = ("depth", "destructors", "main_id", "num_scopes", "pending")

    def __init__(self) -> None:
        self.main_id = threading.main_thread().ident
        self.depth = 0
        self.destructors: set[CodeType] = set()
        self.num_scopes = 0
        self.pending: dict[int, _Deferring] = {}


class _Deferring:
    """A signal handler that is delayed until the outermost section ends."""

    __slots__ = ("original",)

    def __init__(self, original: Callable[[int, FrameType | None], Any]) -> None:
        self.original = original

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if must_wait(number, frame):
            _sections.pending[number] = self
            if not _sections.depth:
                _send_later()
            return None
        if not _is_in_destructor(frame):  # there the exception would be lost: the signal stays, to be sent again
            _sections.pending.pop(number, None)
        # An exception from the handler may skip the `leave` of a section, so the depth must be 0 before it runs.
        depth, _sections.depth = _sections.depth, 0
        answer = self.original(number, frame)
        _sections.depth = depth
        return answer


_sections = _Sections()


def must_wait(number: int, frame: FrameType | None) -> bool:
    """Return whether a signal must be delayed: inside a section or a destructor, unless one is delayed already."""
    return bool(_sections.depth or _is_in_destructor(frame)) and number not in _sections.pending


def _is_in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _sections.destructors:
            return True
        frame = frame.f_back
    return False


def enter() -> int:
    """Begin a section. Return the argument for `leave`, which must be called in a `finally`."""
    if _get_ident() != _sections.main_id:
        return _NOT_MAIN
    before = _sections.depth
    _sections.depth = before + 1
    return before


def leave(before: int) -> None:
    """End a section; after the outermost one, run the handlers that were delayed, which may raise."""
    if before >= 0:
        _sections.depth = before
        if _sections.pending and not before:
            _handle()


def destructor(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Register a destructor, or the callback of a weak reference: signals that arrive in it are handled later."""
    _sections.destructors.add(function.__code__)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return function


_sections.destructors.add(enter.__code__)  # an exception there would leave the depth raised


def shielded(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function whose every call is a section."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        outer = enter()
        try:
            return function(*args, **kwargs)
        finally:
            leave(outer)

    return call


def is_in_section() -> bool:
    """Return whether this is the main thread, inside of a section or a destructor."""
    return _get_ident() == _sections.main_id and (_sections.depth > 0 or _is_in_destructor(sys._getframe(1)))


def call_outside(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call what is not part of the runtime (the engine, with the user's hooks) as if outside of all sections."""
    if _get_ident() != _sections.main_id:
        return function(*args, **kwargs)
    depth = _sections.depth
    try:
        _sections.depth = 0
        if _sections.pending:
            _handle()
        return function(*args, **kwargs)
    finally:
        _sections.depth = depth  # must come first: a signal during an earlier call would not be delayed


def start() -> None:
    """Wrap the installed signal handlers when a scope starts. Do nothing on threads other than the main one."""
    if _get_ident() != _sections.main_id:
        return
    _sections.num_scopes += 1
    if _sections.num_scopes == 1:
        _wrap()


def renew() -> None:
    """Wrap the handlers that are installed now, if a scope is active: the kernel of a notebook exchanges them."""
    if _get_ident() == _sections.main_id and _sections.num_scopes:
        _wrap()


def _wrap() -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _Deferring):
            signal.signal(number, _Deferring(handler))


def stop() -> None:
    """Restore the original handlers when the last scope ends, except those that were replaced since."""
    if _get_ident() != _sections.main_id:
        return
    if not _sections.num_scopes:
        return
    _sections.num_scopes -= 1
    restore()


def restore() -> None:
    """Restore the original handlers if no scope is active.

    A program that saved the wrappers while one was active may have installed them again after it has ended.
    """
    if _get_ident() != _sections.main_id or _sections.num_scopes:
        return
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, _Deferring):
            signal.signal(number, handler.original)


def _in_child() -> None:
    """Reset the state in a forked child: its main thread is the one that forked, and no scope is active."""
    if _get_ident() != _sections.main_id:
        _sections.main_id = _get_ident()
        _sections.depth = 0
    _sections.pending.clear()  # they were sent to the parent
    _sections.num_scopes = 0
    restore()


os.register_at_fork(after_in_child=_in_child)


def _handle() -> None:
    while True:
        try:
            number, handler = _sections.pending.popitem()
        except KeyError:  # none is left, or a helper thread took it
            return
        handler.original(number, sys._getframe())


def _send_later() -> None:
    with contextlib.suppress(RuntimeError):  # no thread can be started: the next section's end handles it
        _thread.start_new_thread(_send_again, ())


def _send_again() -> None:
    time.sleep(_RETRY_S)
    while True:
        try:
            number, _ = _sections.pending.popitem()  # removed first: otherwise it would count as a second signal
        except KeyError:
            return
        _thread.interrupt_main(number)  # pyright: ignore[reportArgumentType] - real-time signals have no name
