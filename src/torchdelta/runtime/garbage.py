"""Tensors that only reference cycles hold: the last room there is before a step is called impossible.

Cycles are common around a training loop (closures over themselves, exceptions that a frame of their own traceback
holds, modules that know their parents), and Python frees them when it comes to it: by the number of new objects, which
says nothing of bytes.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

from torchdelta.runtime import faults

if TYPE_CHECKING:
    from torchdelta.runtime.ledger import Ledger

__all__ = ["collect_garbage"]

_logger = logging.getLogger("torchdelta")


def collect_garbage(ledger: Ledger) -> int:
    """Free what nobody can reach; return by how many bytes that lowered what counts, unseen ones included.

    Takes up to seconds where there are many objects.
    """
    if faults.is_disabled("garbage"):
        return 0
    ledger.ask_counter(fresh=True)
    before_bytes = ledger.total_bytes
    gc.collect()
    ledger.ask_counter(fresh=True)
    freed_bytes = max(before_bytes - ledger.total_bytes, 0)
    if freed_bytes:
        _logger.info("reference cycles alone held %d bytes: collected", freed_bytes)
    return freed_bytes
