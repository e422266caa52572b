"""Compiles on another thread what oneDNN can no longer compile on this one.

[Note: an error of oneDNN lasts]
oneDNN compiles kernels when they are first used. If compiling runs out of memory, its compiler notes the error in a
variable of the thread and never clears it: every later kernel that is new fails on that thread with "could not create a
primitive", however much is free. Compiled kernels are shared between threads. So before such an op is retried, it runs
once on a new thread, which compiles what it needs; the result of that run is not used.

Three kinds of ops still fail on that thread: those that write their arguments, those that draw random numbers, and
those that are not torch's own, whose code may depend on the thread that it runs on. So does whatever runs after the
scope.

[Note: the threads of a new thread]
OpenMP gives each thread that computes in parallel a team of its own, and libgomp ends the process if it cannot start
one of the team's threads. So memory for their stacks is mapped and unmapped before. For the same reason
`Thread.start` is not used: it waits for ever if the new thread ends by a MemoryError before it has said that it runs.
"""

from __future__ import annotations

import _thread
import logging
import mmap
import os
import resource
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import set_grad_enabled
from torchdelta._torch.modes import Quietly

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts

__all__ = ["compile_elsewhere", "is_from_onednn"]

_logger = logging.getLogger("torchdelta")

_ERROR: Final = "could not create a primitive"
_NAMESPACES: Final = frozenset({"aten", "mkldnn", "onednn", "quantized"})
_LARGEST_DEFAULT_STACK_BYTES: Final = 8 << 20  # glibc's, where the limit of stacks is none
_OTHER_BYTES: Final = 1 << 20  # of a thread, beside its stack


def is_from_onednn(error: BaseException) -> bool:
    """Return whether oneDNN could not create a kernel: because of a shortage of memory, or of an earlier one."""
    return str(error) == _ERROR


def compile_elsewhere(facts: OpFacts, run: Callable[[], Any]) -> bool:
    """Run an op on a new thread and wait for it. Return whether it has succeeded there: then its kernels exist.

    Args:
        facts: Facts about the op.
        run: Runs it; may be called twice.
    """
    num_threads = torch.get_num_threads()
    if facts.is_random or facts.name.partition(".")[0] not in _NAMESPACES or not _has_room_for_team(num_threads):
        return False
    has_ended = _thread.allocate_lock()
    has_ended.acquire()
    succeeded: list[str] = []
    try:
        arguments = (_Releasing(has_ended), facts.name, run, num_threads, torch.is_grad_enabled(), succeeded)
        _thread.start_new_thread(_compile, arguments)
    except (RuntimeError, MemoryError):
        return False
    del arguments  # now only the new thread holds the object that releases the lock
    has_ended.acquire()
    if succeeded:
        _logger.info("%s was compiled on another thread: oneDNN has run out of memory on this one", facts.name)
    return bool(succeeded)


class _Releasing:
    """Releases a lock when it is deleted: also if the thread that holds it never runs any code."""

    __slots__ = ("lock",)

    def __init__(self, lock: _thread.LockType) -> None:
        self.lock = lock

    def __del__(self) -> None:
        self.lock.release()


def _compile(
    ended: _Releasing,
    name: str,
    run: Callable[[], Any],
    num_threads: int,
    is_grad_enabled: bool,
    succeeded: list[str],
) -> None:
    del ended  # the caller's tuple still holds it, until this function has returned
    try:
        process_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)  # kernels are compiled for a number of threads
        try:
            with Quietly():
                set_grad_enabled(is_grad_enabled)  # an LSTM's kernel depends on it
                run()
            succeeded.append(name)
        finally:
            if process_threads != num_threads:
                torch.set_num_threads(process_threads)  # what other new threads begin with
    except Exception as error:  # noqa: BLE001 - the retry raises what matters
        _logger.debug("%s could not be compiled on another thread, either: %s", name, error)


def _has_room_for_team(num_threads: int) -> bool:
    """Return whether a new thread and its team can be started; see [Note: the threads of a new thread]."""
    if num_threads == 1:
        return True  # a thread that cannot be started raises
    if "OMP_STACKSIZE" in os.environ or "GOMP_STACKSIZE" in os.environ:
        return False
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _LARGEST_DEFAULT_STACK_BYTES
    size_bytes = num_threads * (stack_bytes + _OTHER_BYTES)
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError, MemoryError):
        return False
    return True
