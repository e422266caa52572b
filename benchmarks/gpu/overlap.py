"""How much of the time in which bytes travel a kernel runs as well, from the device events of the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Span = tuple[int, int]  # start and end, ns


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Device time of one stretch of work.

    Attributes:
        kernel_s: Time in which at least one kernel ran.
        copy_s: Time in which at least one copy between host and device ran.
        both_s: Time in which both did.
    """

    kernel_s: float
    copy_s: float
    both_s: float

    @property
    def share(self) -> float:
        """Hidden share of the copies; 0 without any."""
        return self.both_s / self.copy_s if self.copy_s else 0.0


def merge(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch, in order of time."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def shared_ns(one: list[Span], other: list[Span]) -> int:
    """Return the time that two merged lists have in common."""
    total_ns, first, second = 0, 0, 0
    while first < len(one) and second < len(other):
        start, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        total_ns += max(0, end - start)
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return total_ns


def sum_up(kernels: Iterable[Span], copies: Iterable[Span]) -> Overlap:
    """Return the overlap of spans as the device reported them."""
    merged_kernels, merged_copies = merge(kernels), merge(copies)
    return Overlap(
        kernel_s=sum(end - start for start, end in merged_kernels) / 1e9,
        copy_s=sum(end - start for start, end in merged_copies) / 1e9,
        both_s=shared_ns(merged_kernels, merged_copies) / 1e9,
    )


def measure(work: Callable[[], object]) -> Overlap:
    """Run `work` under the profiler and read what the device did."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    kernels: list[Span] = []
    copies: list[Span] = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name != "CUDA":
            continue
        name, span = event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())
        if name.startswith("Memcpy") and ("HtoD" in name or "DtoH" in name):
            copies.append(span)
        elif not name.startswith("Mem"):
            kernels.append(span)
    return sum_up(kernels, copies)
