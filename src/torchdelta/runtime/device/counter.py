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

The workspace of an op is what it allocates and frees while it runs. The first run may tune algorithms, or make a
workspace that a library keeps, and take much more, so the last measurement counts, not the largest.

On CUDA the allocator calls back for every allocation (native/device_watch.py), if that can be built. So the workspace
of an op and the peak of a step are measured, and memory of ops that are not recorded is counted. A step that is known
to fit need not be recorded, because the watch tells when it passes its limit. Between two readings, only the rounding
of blocks is missing from the count. Without a watch the workspace is the difference of the total freed bytes. This does
not reset the peak, which is one for the process and has other readers. It is an upper bound if an op frees one
temporary before it allocates the next.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from torchdelta._torch.device import allocator_statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.native.device_watch import DeviceWatch

__all__ = ["DeviceCounter"]

_logger = logging.getLogger("torchdelta")

_FADING: Final = 0.99  # of the most that was missed, at each reading


class DeviceCounter:
    """Has the interface of the counting CPU allocator (native/counting.py), but nothing is refused beyond a limit.

    Args:
        device: With its index.
        watch: Sees peaks and limits between two readings of the statistics. None: nothing does.
    """

    is_exact = False  # between two readings, the rounding of large blocks is not known
    is_cheap = False

    def __init__(self, device: torch.device, watch: DeviceWatch | None = None) -> None:
        self.device = device
        self._watch = watch
        self.most_missed_bytes = 0  # by which the watch's count was wrong between two of the latest readings
        self._missed_bytes = 0
        self._allocated_bytes = 0
        self._freed_bytes = 0

    @property
    def sees_peaks(self) -> bool:
        """Whether peaks between two readings are seen, and limits call back."""
        return self._watch is not None

    def start(self) -> None:
        """Do nothing: the allocator always counts."""

    def stop(self) -> None:
        """Remove the limit."""
        self.clear_limit()

    def add(self, size_bytes: int, /) -> None:
        """Do nothing: the allocator counts every storage of the device."""

    def owns(self, address: int, /) -> bool:
        """Return True: every allocation is counted."""
        del address
        return True

    def glance_bytes(self) -> int | None:
        """Return the active bytes except for rounding since the latest reading; None without a watch."""
        return self._watch.live_bytes() if self._watch is not None and self._watch.is_on else None

    def live_capsule(self) -> object:
        """Return a capsule with the address of what `glance_bytes` returns. Call this only if `sees_peaks`."""
        assert self._watch is not None
        return self._watch.live_capsule()

    def live_bytes(self) -> int:
        """Return the active bytes."""
        statistics = self._read()
        return int(statistics["current"]) if statistics is not None else 0

    def _read(self) -> dict[str, Any] | None:
        """Read the allocator's statistics, and correct the watch; go on without one where torch no longer calls it."""
        watch = self._watch
        counted_bytes = watch.live_bytes() if watch is not None else 0
        statistics = allocator_statistics(self.device)
        if watch is None or statistics is None:
            return statistics
        current_bytes = int(statistics["current"])
        missed_bytes = current_bytes - counted_bytes if watch.is_on else 0
        try:
            watch.set_live(current_bytes, counted_bytes)
        except RuntimeError as error:  # a program may have put another allocator in place
            self._watch = None
            _logger.info("every step is recorded: %s", str(error).splitlines()[0])
            return statistics
        self._missed_bytes += missed_bytes
        self.most_missed_bytes = max(abs(missed_bytes), int(_FADING * self.most_missed_bytes))
        return statistics

    def take_missed_bytes(self) -> int | None:
        """Return by how much the watch's count was too low since the last call; None without a watch."""
        missed_bytes, self._missed_bytes = self._missed_bytes, 0
        return missed_bytes if self._watch is not None else None

    def mark(self) -> int:
        """Start to measure. Return the active bytes."""
        statistics = self._read()
        if statistics is None:
            return 0
        if self._watch is not None:
            self._watch.mark()
        else:
            self._allocated_bytes, self._freed_bytes = int(statistics["allocated"]), int(statistics["freed"])
        return int(statistics["current"])

    def growth_bytes(self) -> int:
        """Return the largest growth since the mark; without a watch an upper bound: what was allocated since."""
        if self._watch is not None:
            return self._watch.growth_bytes()
        statistics = allocator_statistics(self.device)
        return int(statistics["allocated"]) - self._allocated_bytes if statistics is not None else 0

    def freed_bytes(self) -> int:
        """Return the bytes that were freed since the mark, without a watch."""
        statistics = allocator_statistics(self.device)
        return int(statistics["freed"]) - self._freed_bytes if statistics is not None else 0

    def take_peak_bytes(self) -> int:
        """Return the peak since the last call; 0 without a watch: the caller keeps the peak of the readings."""
        self.live_bytes()  # which corrects the watch
        return self._watch.take_peak_bytes() if self._watch is not None else 0

    def set_limit(self, limit_bytes: int, most_bytes: int, on_limit: Callable[[], object], /) -> None:
        """Call a function once when the active bytes pass a limit: on the main thread, between two instructions.

        Args:
            limit_bytes: The limit.
            most_bytes: Has no effect: torch's allocator refuses nothing that the device has room for.
            on_limit: The function.
        """
        del most_bytes
        self.live_bytes()
        if self._watch is not None:
            self._watch.set_limit(limit_bytes, self.live_bytes, on_limit)

    def clear_limit(self) -> None:
        """Remove the limit."""
        if self._watch is not None:
            self._watch.clear_limit()
