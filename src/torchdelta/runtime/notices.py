"""Warnings of the runtime that would come back with every scope or step: each is said once a process."""

from __future__ import annotations

import functools
import logging

__all__ = ["say_once"]

_logger = logging.getLogger("torchdelta")


@functools.cache
def say_once(message: str) -> None:
    """Log a warning, unless the same one was logged before."""
    _logger.warning(message)
