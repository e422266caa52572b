"""Recognizes an allocator's out-of-memory error."""

from __future__ import annotations

import torch

from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.memory.onednn import is_from_onednn

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an allocator's out-of-memory error. On CPU it is a RuntimeError, known by its text.

    oneDNN's error does not tell the reason; if it is another one, the retry fails as well.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return not isinstance(error, BudgetError)
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return ("DefaultCPUAllocator" in text and "memory" in text) or is_from_onednn(error)
