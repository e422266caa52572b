"""Warnings that would repeat in every scope, step or trace: each is logged once per process."""

from __future__ import annotations

import functools
import logging

__all__ = ["warn_once"]

_logger = logging.getLogger("torchdelta")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same one was logged before."""
    _logger.warning(message)
