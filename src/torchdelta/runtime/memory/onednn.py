"""Compiles on another thread what oneDNN can no longer compile on this one.

[Note: an error of oneDNN lasts]
oneDNN compiles kernels when they are first used. If compiling runs out of memory, its compiler notes the error in a
variable of the thread and never clears it: every later kernel that is new fails on that thread with "could not create a
primitive", however much is free. Compiled kernels are shared between threads. So before such an op is retried, it runs
once on a new thread, which compiles what it needs; the result of that run is not used.

Still failing on the first thread: ops that write their arguments, ops that draw random numbers, ops that are not
torch's own, whose code may depend on the thread that it runs on; and everything new that runs after the scope.

[Note: the threads of a new thread]
OpenMP gives each thread that computes in parallel a team of its own, and libgomp ends the process if it cannot start
one of the team's threads. So the new thread first maps and unmaps as much memory as their stacks take, and starts the
team right after that, before the op allocates anything. If an environment variable sets the size of OpenMP's stacks,
which would have to be parsed, nothing is compiled elsewhere. A limit on the number of threads is not checked.

`Thread.start` is not used: it waits for ever if the new thread ends by a MemoryError before it has said that it runs.
With next to no memory, a thread cannot run one line of Python, neither to release a lock nor in a destructor. So the
caller watches an object that only the new thread holds.
"""

from __future__ import annotations

import _thread
import logging
import mmap
import os
import resource
import time
import weakref
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
_LARGEST_DEFAULT_STACK_BYTES: Final = 8 << 20  # at most glibc's, where stacks have no limit
_OTHER_BYTES: Final = 1 << 20  # of a thread, beside its stack
_FEWEST_NUMBERS_A_THREAD: Final = 32768  # torch gives each thread at least so many
_POLL_S: Final = 5e-4


def is_from_onednn(error: BaseException) -> bool:
    """Return whether oneDNN could not create a kernel: because of a shortage of memory, or of an earlier one."""
    return str(error) == _ERROR


def compile_elsewhere(facts: OpFacts, run: Callable[[], Any]) -> bool:
    """Run an op on a new thread and wait for it. Return whether it has succeeded there: then its kernels exist.

    Args:
        facts: Facts about the op.
        run: Runs it.
    """
    if facts.is_random or facts.name.partition(".")[0] not in _NAMESPACES:
        return False
    errors: list[str] = []
    succeeded: list[bool] = []
    held = _Held()
    watched = weakref.ref(held)
    arguments = (held, run, torch.get_num_threads(), torch.is_grad_enabled(), succeeded, errors)
    del held
    try:
        _thread.start_new_thread(_compile, arguments)
    except (RuntimeError, MemoryError):
        return False
    del arguments  # now only the new thread holds them
    while watched() is not None:
        time.sleep(_POLL_S)
    # Logged here: a handler may be locked by this thread, and may keep what it is given.
    if succeeded:
        _logger.info("%s was compiled on another thread: oneDNN has run out of memory on this one", facts.name)
    elif errors:
        _logger.debug("%s could not be compiled on another thread, either: %s", facts.name, errors[0])
    return bool(succeeded)


class _Held:
    """Lives until the thread that holds it has ended, or could not begin."""

    __slots__ = ("__weakref__",)


def _compile(
    held: _Held,
    run: Callable[[], Any],
    num_threads: int,
    is_grad_enabled: bool,
    succeeded: list[bool],
    errors: list[str],
) -> None:
    del held  # the tuple of the arguments holds it until this function has returned
    try:
        process_threads = torch.get_num_threads()
        if process_threads != num_threads:  # kernels are compiled for a number of threads
            torch.set_num_threads(num_threads)
        try:
            with Quietly():
                if not _has_team(num_threads):
                    return
                set_grad_enabled(is_grad_enabled)  # an LSTM's kernel depends on it
                run()
            succeeded.append(True)
        finally:
            if process_threads != num_threads:
                torch.set_num_threads(process_threads)  # what other new threads begin with
    except Exception as error:  # noqa: BLE001 - the retry raises what matters
        errors.append(str(error))


def _has_team(num_threads: int) -> bool:
    """Start the team of this thread if there is memory for it. Return whether it is there."""
    if not _has_room_for_team(num_threads):
        return False
    if num_threads > 1:
        torch.zeros(1).expand(num_threads * _FEWEST_NUMBERS_A_THREAD).sum()
    return True


def _has_room_for_team(num_threads: int) -> bool:
    """Return whether the stacks of a team fit into memory; see [Note: the threads of a new thread]."""
    if num_threads == 1:
        return True
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
