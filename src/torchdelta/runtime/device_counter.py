"""The counter of an accelerator: what its caching allocator says is active.

[Note: active bytes]
The budget of an accelerator is held in the allocator's active bytes: blocks in use, rounded up as the allocator does
(to 512 bytes, and a large block is left whole when what would be left over is under 1 MiB), and freed blocks that still
wait for another stream. What lies in its cache besides (reserved bytes) is not part of it: the allocator gives that
back before it runs out. Beyond the known storages the active bytes hold what nobody tells of: the rounding, cuBLAS's
workspaces (one for each thread and stream that multiplies, kept for good), and tensors of other threads of the process.

Asking costs tens of microseconds, so far from the budget it is done only where something new may have happened: when an
op's need is measured (its first few meetings), and when a backward or a step begins. Near the budget it is done before
every op.

What an op has inside itself is what it allocates and frees again while it runs: the difference of the bytes that were
ever freed. That asks for no reset of the peak, which is one for the process and which others read, and it leaves out
what stays (a workspace). It is an upper bound where an op frees one temporary before it takes the next. The first
meeting may tune algorithms and take much more, so the last measurement counts and not the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta._torch_device import allocator_statistics

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceCounter"]


class DeviceCounter:
    """Answers as the counting CPU allocator does (native/counting.py), but for peaks: `is_exact` is False."""

    is_exact = False  # a peak between two questions is not seen
    is_cheap = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocated_bytes = 0
        self._freed_bytes = 0

    def start(self) -> None:
        """Nothing is to be done: the allocator counts anyway."""

    def stop(self) -> None:
        """Nothing is to be done."""

    def add(self, size_bytes: int, /) -> None:
        """Nothing comes from elsewhere: every storage of the device is the allocator's."""

    def owns(self, address: int, /) -> bool:
        """Say that the allocation is counted, whatever it is."""
        del address
        return True

    def live_bytes(self) -> int:
        """Return the active bytes."""
        statistics = allocator_statistics(self.device)
        return int(statistics["current"]) if statistics is not None else 0

    def mark(self) -> int:
        """Begin to measure here. Returns the active bytes."""
        statistics = allocator_statistics(self.device)
        if statistics is None:
            return 0
        self._allocated_bytes, self._freed_bytes = int(statistics["allocated"]), int(statistics["freed"])
        return int(statistics["current"])

    def growth_bytes(self) -> int:
        """Return the bytes that were allocated since the mark: the growth is that or less."""
        statistics = allocator_statistics(self.device)
        return int(statistics["allocated"]) - self._allocated_bytes if statistics is not None else 0

    def freed_bytes(self) -> int:
        """Return the bytes that were freed since the mark."""
        statistics = allocator_statistics(self.device)
        return int(statistics["freed"]) - self._freed_bytes if statistics is not None else 0

    def take_peak_bytes(self) -> int:
        """Return 0: whoever asks keeps the peak of what was seen."""
        return 0
