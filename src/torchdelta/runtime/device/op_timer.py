"""Timers of ops: host time where ops run when they are called, device events where they run asynchronously.

[Note: times of asynchronous ops]
On an accelerator a call returns when its kernel is queued. Host time would measure the launch only, which is far too
little, and recomputing would always seem cheap. So two events are recorded around an op, and their difference is read
once both were reached, without waiting. A time belongs to the op's `Need` (op, shapes, dtypes), and only the first few
runs are measured: an event costs microseconds. The least time counts, because the first run also loads the kernel,
tunes it and takes its memory from the driver. One case does wait: a ranking of candidates in a step whose ops were
never measured. Launch times would choose wrongly there, and this happens once.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from torchdelta._torch.device import current_stream
from torchdelta.runtime.state.need import Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.buffer import OpEntry
    from torchdelta.runtime.state.need import Need

__all__ = ["NUM_SAMPLES", "EventTimer", "HostTimer", "OpTimer"]

NUM_SAMPLES: Final = 4  # runs of an op that are measured
_now_s = time.perf_counter


class OpTimer(Protocol):
    """Measures ops one after the other."""

    def start(self, need: Need) -> Any:
        """Start to time an op. Return the argument of `stop`."""
        ...

    def stop(self, mark: Any, entry: OpEntry | None) -> float:
        """Stop. Set the entry's `time_s`, now or when it is known. Return the best estimate so far, in seconds."""
        ...

    def poll(self, *, wait: bool = False) -> None:
        """Read the times that are known now. `wait`: also wait for ops that have no time yet."""
        ...


class HostTimer:
    """For devices on which an op has run when its call returns.

    Args:
        now_s: Returns the time in seconds: wall time by default; benchmarks on a busy machine use thread time.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s

    def start(self, need: Need) -> float:
        """Read the time."""
        del need
        return self._now_s()

    def stop(self, mark: float, entry: OpEntry | None) -> float:
        """Read the time again."""
        time_s = self._now_s() - mark
        if entry is not None:
            entry.time_s = time_s
        return time_s

    def poll(self, *, wait: bool = False) -> None:
        """Do nothing: every time is known at once."""


class EventTimer:
    """For accelerators. See [Note: times of asynchronous ops]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[Timing, torch.Event, torch.Event]] = deque()
        self._spare: list[torch.Event] = []

    def start(self, need: Need) -> tuple[Timing, torch.Event | None, float]:
        """Record an event if the op is still to be measured."""
        timing = need.timing
        if timing is None:
            timing = need.timing = Timing()
        if timing.num_samples >= NUM_SAMPLES:
            return timing, None, 0.0
        timing.num_samples += 1
        event = self._event()
        event.record(current_stream(self.device))
        return timing, event, _now_s()

    def stop(self, mark: tuple[Timing, torch.Event | None, float], entry: OpEntry | None) -> float:
        """Record the second event, and read older pairs that were reached."""
        timing, first, start_s = mark
        if first is not None:
            if not timing.is_known:
                timing.time_s = max(timing.time_s, _now_s() - start_s)
            second = self._event()
            second.record(current_stream(self.device))
            self._pending.append((timing, first, second))
            self.poll()
        if entry is not None:
            entry.time_s = timing.time_s
            if not timing.is_known:
                timing.waiting.append(weakref.ref(entry))
        return timing.time_s

    def poll(self, *, wait: bool = False) -> None:
        """Read the pairs of events that were reached, oldest first; streams may reach them in another order."""
        pending = self._pending
        while pending:
            timing, first, second = pending[0]
            if not second.query():
                if not wait or timing.is_known:
                    return
                second.synchronize()
            pending.popleft()
            timing.learn(first.elapsed_time(second) * 1e-3)
            self._spare += (first, second)

    def _event(self) -> torch.Event:
        return self._spare.pop() if self._spare else torch.Event(self.device, enable_timing=True)
