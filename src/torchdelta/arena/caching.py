"""The caching allocator of a session: large freed blocks are used again while it runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchdelta.errors import NativeError
from torchdelta.native.caching import caching_allocator

if TYPE_CHECKING:
    from torchdelta.native.caching import CachingAllocator

__all__ = ["Caching"]

_logger = logging.getLogger("torchdelta")


class Caching:
    """Turns the caching allocator on and off for one session on CPU. Without one it does nothing. Mutable."""

    def __init__(self) -> None:
        self._allocator: CachingAllocator | None = None

    def start(self) -> None:
        """Use it from now on, if it can be built."""
        allocator = caching_allocator()
        if isinstance(allocator, NativeError):
            _logger.info("no caching allocator (%s): the C library's heap may keep more than the budget", allocator)
            return
        self._allocator = allocator
        allocator.start()

    def stop(self) -> None:
        """Stop using it."""
        if self._allocator is not None:
            allocator, self._allocator = self._allocator, None
            allocator.stop()

    def on_step_end(self) -> None:
        """Learn nothing: it needs no plan."""

    def leave_child(self) -> None:
        """Forget it in a forked child, where the C++ side has turned it off."""
        self._allocator = None
