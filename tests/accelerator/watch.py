"""What native/device_watch.py does for CUDA, for the stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.same_bits.judge import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable


class StandinWatch:
    """The bytes in use on the stand-in. Limits are compared at readings only: its allocator calls nobody."""

    is_on = True

    def __init__(self, device: torch.device) -> None:
        self._counts: Any = torch.get_device_module(DEVICE).watch
        self._index = device.index
        self._peak_bytes = self._marked_bytes = self._peak_since_mark_bytes = 0
        self._limit_bytes: int | None = None
        self._on_limit: Callable[[], object] = lambda: None

    def _note_peak(self) -> None:
        peak_bytes = self._counts.take_peak(self._index)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self._peak_since_mark_bytes = max(self._peak_since_mark_bytes, peak_bytes)

    def set_live(self, size_bytes: int, counted_bytes: int) -> None:
        """Compare a reading with what was counted, and with the limit."""
        assert size_bytes == counted_bytes
        if self._limit_bytes is not None and size_bytes > self._limit_bytes:
            self._limit_bytes = None
            self._on_limit()

    def live_bytes(self) -> int:
        """Return the bytes in use."""
        return self._counts.live_bytes(self._index)

    def live_capsule(self) -> object:
        """Return where they are."""
        return self._counts.live_capsule(self._index)

    def take_peak_bytes(self) -> int:
        """Return their peak since the last call."""
        self._note_peak()
        peak_bytes, self._peak_bytes = self._peak_bytes, self.live_bytes()
        return peak_bytes

    def mark(self) -> None:
        """Start to measure growth."""
        self._note_peak()
        self._marked_bytes = self._peak_since_mark_bytes = self.live_bytes()

    def growth_bytes(self) -> int:
        """Return the largest growth since the mark."""
        self._note_peak()
        return self._peak_since_mark_bytes - self._marked_bytes

    def set_limit(self, limit_bytes: int, read: Callable[[], int], on_limit: Callable[[], object]) -> None:
        """Have a limit."""
        del read
        self._limit_bytes, self._on_limit = limit_bytes, on_limit

    def clear_limit(self) -> None:
        """Have none."""
        self._limit_bytes = None
