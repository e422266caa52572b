"""The counter of an accelerator: it reads the active bytes of the caching allocator.

[Note: active bytes]
The budget of an accelerator limits the allocator's active bytes: blocks in use, rounded up as the allocator does (to
512 bytes; a large block is not split if less than 1 MiB would remain), and freed blocks that still wait for another
stream. The allocator's cache (reserved bytes) is not included: the allocator frees it before it runs out of memory.
Besides the known storages, active bytes include the rounding, cuBLAS's workspaces (one for each thread and stream that
multiplies matrices, never freed), and tensors of other threads of the process.

Reading the statistics costs tens of microseconds. They are read when something new may have happened: when an op is
measured (its first few runs), and when a backward or a step begins. Between these they are read once in some requests;
see [Note: reading seldom] in reserve.py.

The workspace of an op is what it allocates and frees while it runs: the difference of the total freed bytes. This does
not reset the peak, which is one for the process and has other readers, and it leaves out what the op keeps (cuBLAS's
workspace). It is an upper bound if an op frees one temporary before it allocates the next. The first run may tune
algorithms and take much more, so the last measurement counts, not the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta._torch.device import allocator_statistics

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceCounter"]


class DeviceCounter:
    """Has the interface of the counting CPU allocator (native/counting.py), without peaks: `is_exact` is False."""

    is_exact = False  # a peak between two readings is not seen
    is_cheap = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocated_bytes = 0
        self._freed_bytes = 0

    def start(self) -> None:
        """Do nothing: the allocator always counts."""

    def stop(self) -> None:
        """Do nothing."""

    def add(self, size_bytes: int, /) -> None:
        """Do nothing: the allocator counts every storage of the device."""

    def owns(self, address: int, /) -> bool:
        """Return True: every allocation is counted."""
        del address
        return True

    def live_bytes(self) -> int:
        """Return the active bytes."""
        statistics = allocator_statistics(self.device)
        return int(statistics["current"]) if statistics is not None else 0

    def mark(self) -> int:
        """Start to measure. Return the active bytes."""
        statistics = allocator_statistics(self.device)
        if statistics is None:
            return 0
        self._allocated_bytes, self._freed_bytes = int(statistics["allocated"]), int(statistics["freed"])
        return int(statistics["current"])

    def growth_bytes(self) -> int:
        """Return the bytes that were allocated since the mark: an upper bound of the growth."""
        statistics = allocator_statistics(self.device)
        return int(statistics["allocated"]) - self._allocated_bytes if statistics is not None else 0

    def freed_bytes(self) -> int:
        """Return the bytes that were freed since the mark."""
        statistics = allocator_statistics(self.device)
        return int(statistics["freed"]) - self._freed_bytes if statistics is not None else 0

    def take_peak_bytes(self) -> int:
        """Return 0: the caller keeps the peak of the readings."""
        return 0
