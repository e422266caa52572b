"""The device whose memory is held: how much of it there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from torchdelta.host import read_host_memory

if TYPE_CHECKING:
    from torchdelta.runtime.ledger import Ledger


def device_memory_bytes() -> int:
    """Return the bytes of the device.

    The GPU's memory, or on CPU the lesser of RAM and the limits of the cgroups that this process is in.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return read_host_memory().usable_bytes


class PeakMeter:
    """Measures how many bytes more than at its start a piece of code had at its highest.

    CUDA has statistics, and on CPU the ledger may have a counter at the allocator. Without one, under Linux the
    kernel's high-water mark of resident pages is reset and read: an estimate from below, since pages that the C library
    has kept from earlier count as there already. Elsewhere it says 0.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.device_type = ledger.device_type
        self._counter = ledger.counter if ledger.is_counting else None
        self.extra_bytes = 0
        self._start_bytes = 0

    def __enter__(self) -> Self:
        """Note the level."""
        if self.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._start_bytes = torch.cuda.memory_allocated()
            return self
        if self._counter is not None:
            self._counter.mark()
            return self
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return self
        self._start_bytes = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_exc: object) -> None:
        """Read the high-water mark."""
        if self.device_type == "cuda":
            self.extra_bytes = torch.cuda.max_memory_allocated() - self._start_bytes
        elif self._counter is not None:
            self.extra_bytes = self._counter.growth_bytes()
        elif self._start_bytes:
            self.extra_bytes = max(0, _resident_bytes("VmHWM") - self._start_bytes)


def _resident_bytes(field: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
