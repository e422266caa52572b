"""After an out-of-memory error inside an op: all that can leaves the device, garbage too, and the op runs once more.

The budget is kept before an op runs, but the memory may be less than the user thought: another process came, or the
budget was set too high. What the allocator then raises need not end the step.

[Note: when an op may run twice]
Only when it writes none of its arguments (a half-written one cannot be told from a whole one), and only when the random
numbers it may have drawn can be put back. So: ops that make new tensors, batch norm in training not among them; random
ops when the state of their generator was noted before. Everything else ends in the allocator's own error, and so does a
second failure. `BudgetError` is an answer, not an accident: it is never tried again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from torchdelta.aten.facts import TRAINING_POSITION, Kind
from torchdelta.runtime import faults
from torchdelta.runtime.errors import BudgetError

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.residency import Residency
    from torchdelta.runtime.tape import OpEntry

_logger = logging.getLogger("torchdelta")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an allocator had nothing left. On CPU that is a RuntimeError by its text."""
    if isinstance(error, torch.OutOfMemoryError):
        return not isinstance(error, BudgetError)
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error) and "memory" in str(error)


def may_retry(
    error: RuntimeError, facts: OpFacts, args: tuple[Any, ...], entry: OpEntry | None, residency: Residency
) -> bool:
    """Say whether an op that failed may run once more; if so, all that can leave the device has left it.

    Args:
        error: What the op raised.
        facts: What is known of the op.
        args: Its arguments.
        entry: Its place on the tape, which holds the generator's state before it; None when it is not recorded.
        residency: Who sends buffers away.
    """
    if not is_out_of_memory(error) or residency.surveys or faults.is_disabled("oom-retry"):
        return False
    if facts.kind is not Kind.COMPUTE or facts.is_collective:  # the other ranks would wait for a second call
        return False
    if facts.keeps_statistics and len(args) > TRAINING_POSITION and args[TRAINING_POSITION]:
        return False
    if facts.is_random:
        if entry is None or entry.random_state is None:
            return False
        generator, state = entry.random_state
        generator.set_state(state)
    return _has_made_room(facts, residency)


def may_replay_again(error: RuntimeError, facts: OpFacts, residency: Residency) -> bool:
    """Say the same of an op that failed while it was recomputed.

    A replay puts its own random numbers in place, and what it writes of batch norm's statistics is scratch.
    """
    if not is_out_of_memory(error) or facts.kind is not Kind.COMPUTE or faults.is_disabled("oom-retry"):
        return False
    return _has_made_room(facts, residency)


def _has_made_room(facts: OpFacts, residency: Residency) -> bool:
    freed_bytes = residency.collect_garbage()  # first: what garbage holds as well cannot leave
    sent_bytes = residency.send_all_away()
    if freed_bytes + sent_bytes <= 0:
        return False
    _logger.warning(
        "%s ran out of memory below the budget: %d bytes left the device, %d were garbage, and it runs again%s",
        facts.name,
        sent_bytes,
        freed_bytes,
        "; a smaller budget would spare this" if sent_bytes else "",
    )
    return True
