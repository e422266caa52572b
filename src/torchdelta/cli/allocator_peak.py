"""Counts live bytes and their peak at the CPU allocator, independently of what torchdelta itself counts.

A dispatch mode does not see ops below modes, such as a replay's, so a budget has to be checked at the allocator. On CPU
torch keeps no statistics, but its profiler reports each allocation and each free, which are added up here.

It does not see:
- tensors that were allocated before the first segment: start before the model is built;
- allocations and frees of threads other than the one that opened the segment (backward on CPU runs on that thread);
- anything between two segments: free no tensor there.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch

__all__ = ["AllocatorPeak", "MeterError", "SegmentPeak"]

_MEMORY_EVENT: Final = "[memory]"


class MeterError(RuntimeError):
    """The meter saw no events, or impossible ones: its figures must not be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPeak:
    """Figures of one `with` segment.

    Attributes:
        live_bytes: Live bytes at its end.
        peak_bytes: Highest live bytes in it, including those from earlier segments.
        num_events: Number of allocations and frees.
    """

    live_bytes: int
    peak_bytes: int
    num_events: int


class AllocatorPeak:
    """A running total of live CPU bytes over one or several `with` segments, and its highest value.

    A segment costs one or two microseconds per op. Its events are added up when it ends, so one segment per step keeps
    their memory small. The totals carry over from one segment to the next.

    Example:
        >>> meter = AllocatorPeak()
        >>> with meter:
        ...     weights = torch.zeros(1024)
        >>> with meter:
        ...     total = (weights + 1).sum().item()
        >>> meter.live_bytes, meter.peak_bytes > meter.live_bytes, len(meter.segments)
        (4096, True, 2)
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.num_events = 0
        self.segments: list[SegmentPeak] = []
        self._profiler: Any = None

    def __enter__(self) -> Self:
        """Begin a segment."""
        if self._profiler is not None:
            raise MeterError("a segment of this meter is open already: segments follow each other, they do not nest")
        profiler = torch.autograd.profiler.profile(profile_memory=True)
        profiler.__enter__()
        self._profiler = profiler
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the segment and add up its events.

        Raises:
            MeterError: There were no events, or more was freed than allocated. Not raised if the segment ends with an
                exception.
        """
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        segment_peak_bytes, num_events, lowest_bytes = self.live_bytes, 0, 0
        for event in profiler.kineto_results.events():
            if event.name() == _MEMORY_EVENT and event.device_type().name == "CPU":
                self.live_bytes += event.nbytes()
                segment_peak_bytes = max(segment_peak_bytes, self.live_bytes)
                lowest_bytes = min(lowest_bytes, self.live_bytes)
                num_events += 1
        self.num_events += num_events
        self.peak_bytes = max(self.peak_bytes, segment_peak_bytes)
        self.segments.append(
            SegmentPeak(live_bytes=self.live_bytes, peak_bytes=segment_peak_bytes, num_events=num_events)
        )
        if error is not None:
            return
        if num_events == 0:
            raise MeterError(
                "the profiler reported no memory event in this segment: nothing was allocated on this thread, "
                "or another allocator (c10::SetCPUAllocator) hides them"
            )
        if lowest_bytes < 0:
            raise MeterError(f"{-lowest_bytes} bytes more were freed than allocated: the meter was started too late")

    def check_live(self, known_bytes: int, *, tolerance: float = 0.01) -> None:
        """Compare the live total with the storages that the caller knows to be alive.

        Args:
            known_bytes: Bytes of all distinct storages alive at the end of the last segment.
            tolerance: Largest allowed difference, as a share of `known_bytes`.

        Raises:
            MeterError: They disagree, so the peak cannot be trusted either.
        """
        if abs(self.live_bytes - known_bytes) > tolerance * known_bytes:
            raise MeterError(
                f"the meter counts {self.live_bytes} live bytes, but the known storages have {known_bytes} bytes: "
                "memory was allocated or freed on another thread, or between two segments"
            )
