"""Retries an op that ran out of memory, after garbage is collected and everything that can be evicted has been.

The budget is enforced before an op runs, but the device may have less memory than the budget: another process may have
allocated some, or the budget may be set too high. An out-of-memory error from the allocator need not end the step.

[Note: when an op may run twice]
An op is retried only when it writes none of its arguments (a partly written argument cannot be told from a complete
one), and only when the random numbers that it may have drawn can be restored. That allows ops that only make new
tensors, except batch norm in training; and random ops whose generator's state was recorded before the op. In every
other case, and when the second run fails too, the allocator's own error is raised. A `BudgetError` is never retried: it
is the answer that the budget is impossible, not a failed allocation.

[Note: an error of oneDNN lasts]
oneDNN compiles kernels when they are first used. Where that runs out of memory, its compiler notes the error in a
variable of the thread and never clears it: every later kernel that is new fails on that thread with "could not create a
primitive", however much is free. Compiled kernels are shared between threads. So before such an op is retried, it runs
once on a new thread, which compiles what it needs; the result of that run is not used.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modes import Quietly
from torchdelta.aten.facts import TRAINING_POSITION, Kind
from torchdelta.native.caching import release_kept
from torchdelta.runtime.errors import BudgetError
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.buffer import OpEntry

_logger = logging.getLogger("torchdelta")

_ONEDNN_ERROR = "could not create a primitive"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an allocator's out-of-memory error. On CPU it is a RuntimeError, known by its text.

    oneDNN raises its error for other reasons, too; the second run then fails as well.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return not isinstance(error, BudgetError)
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return ("DefaultCPUAllocator" in text and "memory" in text) or _is_from_onednn(error)


def _is_from_onednn(error: BaseException) -> bool:
    return str(error).startswith(_ONEDNN_ERROR)


def may_retry(error: BaseException, facts: OpFacts, args: tuple[Any, ...], entry: OpEntry | None, room: Room) -> bool:
    """Return whether a failed op may be retried; if so, everything that can be evicted has been.

    Args:
        error: What the op raised.
        facts: Facts about the op.
        args: Its arguments.
        entry: Its entry on the tape, with the generator's state before the op; None when the op is not recorded.
        room: Evicts buffers.
    """
    if not is_out_of_memory(error) or room.ledger.surveys:
        return False
    if facts.kind is not Kind.COMPUTE or facts.is_collective:  # the other ranks would not join a second call
        return False
    if facts.keeps_statistics and len(args) > TRAINING_POSITION and args[TRAINING_POSITION]:
        return False
    if facts.is_random:
        if entry is None or entry.random_state is None:
            return False
        generator, state = entry.random_state
        generator.set_state(state)
    return _has_made_room(facts, room) or _is_from_onednn(error)


def may_retry_replay(error: RuntimeError, facts: OpFacts, room: Room) -> bool:
    """Return whether an op that failed in a replay may be retried; if so, everything that can be evicted has been.

    A replay restores its random state itself, and writes batch norm's statistics into scratch tensors.
    """
    if not is_out_of_memory(error) or facts.kind is not Kind.COMPUTE:
        return False
    return _has_made_room(facts, room) or _is_from_onednn(error)


def run_again(error: BaseException, facts: OpFacts, run: Callable[..., Any], *args: Any) -> Any:
    """Run an op that may be retried a second time. See [Note: an error of oneDNN lasts].

    Args:
        error: What the first run raised.
        facts: Facts about the op.
        run: Runs it.
        *args: What `run` is called with.
    """
    if _is_from_onednn(error) and not facts.is_random:  # random numbers must not be drawn twice
        with contextlib.suppress(RuntimeError):  # no thread could be started: the retry tells how it went
            compiling = threading.Thread(target=_compile, args=(run, args), name="torchdelta-onednn")
            compiling.start()
            compiling.join()
    return run(*args)


def _compile(run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(torch.get_num_threads())  # kernels are compiled for a number of threads
    with contextlib.suppress(Exception), Quietly():
        run(*args)


def _has_made_room(facts: OpFacts, room: Room) -> bool:
    freed_bytes = room.collect_garbage()  # first: a storage that garbage refers to cannot be freed
    evicted_bytes = released_bytes = 0
    if room.transfers.opened_tier is None:  # its threads need memory, too: what can be recomputed leaves before
        with room.transfers.without_tier():
            evicted_bytes = room.evict_all()
        released_bytes = release_kept()
    evicted_bytes += room.evict_all()
    released_bytes += release_kept()  # libraries allocate past torch, and cannot use pages that are kept for tensors
    if freed_bytes + evicted_bytes + released_bytes <= 0:
        return False
    _logger.warning(
        "%s ran out of memory below the budget: it is retried after evicting %s, collecting %s of garbage "
        "and releasing %s of unused pages%s",
        facts.name,
        format_bytes(evicted_bytes),
        format_bytes(freed_bytes),
        format_bytes(released_bytes),
        "; the device has less free than the budget: a smaller one avoids this" if evicted_bytes else "",
    )
    return True
