"""Retries an op that ran out of memory, after making room: garbage is collected, and all that can be is evicted.

The budget is enforced before an op runs, but the device may have less memory than the budget: another process may have
allocated some, or the budget may be set too high. An out-of-memory error from the allocator need not end the step.

[Note: when an op may run twice]
An op is retried only when it writes none of its arguments (a partly written argument cannot be told from a complete
one), and only when the random numbers that it may have drawn can be restored. That allows ops that only make new
tensors, except batch norm in training; and random ops whose generator's state was recorded before the op. In every
other case, and when the retry fails too, the allocator's own error is raised. A `BudgetError` is never retried: it is
the answer that the budget is impossible, not a failed allocation. An op whose kernel oneDNN cannot compile on this
thread runs on another thread before it is retried: see onednn.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from torchdelta.aten.batch_norm import TRAINING_POSITION
from torchdelta.aten.facts import Kind
from torchdelta.native.caching import release_kept
from torchdelta.runtime.memory.onednn import compile_elsewhere, is_from_onednn
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.buffer import OpEntry

_logger = logging.getLogger("torchdelta")


def may_retry(error: BaseException, facts: OpFacts, args: tuple[Any, ...], entry: OpEntry | None, room: Room) -> bool:
    """Return whether a failed op may be retried, after its random state was restored.

    Args:
        error: What the op raised.
        facts: Facts about the op.
        args: Its arguments.
        entry: Its entry on the tape, with the generator's state before the op; None when the op is not recorded.
        room: Knows whether a survey is running.
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
    return True


def may_retry_replay(error: RuntimeError, facts: OpFacts) -> bool:
    """Return whether an op that failed in a replay may be retried.

    A replay restores its random state itself, and writes batch norm's statistics into scratch tensors.
    """
    return is_out_of_memory(error) and facts.kind is Kind.COMPUTE


def prepare_retry(error: BaseException, facts: OpFacts, room: Room, run: Callable[[], Any]) -> bool:
    """Compile what oneDNN could not, or else evict everything that can leave. Return whether a retry may succeed.

    Args:
        error: What the op raised.
        facts: Facts about the op, which may be retried.
        room: Evicts buffers.
        run: Runs the op.
    """
    if not is_from_onednn(error):
        return _has_made_room(error, facts, room)
    if compile_elsewhere(facts, run):
        return True
    has_made_room = _has_made_room(error, facts, room)
    return compile_elsewhere(facts, run) or has_made_room


def run_again(error: BaseException, facts: OpFacts, room: Room, run: Callable[[], Any]) -> Any:
    """Retry an op, once `prepare_retry` has returned True.

    The retry may meet the other kind of error: with room for its outputs, an op meets oneDNN's error of an earlier
    shortage; or the thread on which it was compiled has used the room. Then it is prepared and retried once more.

    Args:
        error: What the first run raised.
        facts: Facts about the op.
        room: Evicts buffers.
        run: Runs the op.
    """
    try:
        return run()
    except RuntimeError as second:
        is_other = is_out_of_memory(second) and is_from_onednn(second) != is_from_onednn(error)
        if facts.is_random or not is_other or not prepare_retry(second, facts, room, run):
            raise
    return run()


def _has_made_room(error: BaseException, facts: OpFacts, room: Room) -> bool:
    freed_bytes = room.collect_garbage()  # first: a storage that garbage refers to cannot be freed
    evicted_bytes = released_bytes = 0
    is_of_device = isinstance(error, torch.OutOfMemoryError)
    if room.transfers.opened_tier is None and not is_of_device:
        # The tier's threads need memory of the host, which has run out: first, what can be recomputed is dropped.
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
