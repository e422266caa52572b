"""Collects tensors that only reference cycles keep alive, before a budget is reported as impossible.

Reference cycles are common around a training loop: closures that refer to themselves, exceptions whose traceback holds
a frame that refers to them, modules that refer to their parents. Python's collector runs after a number of new objects,
however many bytes the cycles hold.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.runtime.state.usage import Usage

__all__ = ["collect_garbage"]

_logger = logging.getLogger("torchdelta")


def collect_garbage(usage: Usage) -> int:
    """Free unreachable objects. Return by how many bytes that lowered the usage.

    Takes up to seconds in a process with many objects.
    """
    usage.ask_counter(fresh=True)
    before_bytes = usage.total_bytes
    gc.collect()
    usage.ask_counter(fresh=True)
    freed_bytes = max(before_bytes - usage.total_bytes, 0)
    if freed_bytes:
        _logger.info("collected %d bytes that only reference cycles kept alive", freed_bytes)
    return freed_bytes
