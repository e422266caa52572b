"""How long an op takes: by the host's clock where ops run when they are called, by device events where they do not.

[Note: times of asynchronous ops]
On an accelerator a call returns when its kernel has been queued, so the host's clock tells what launching costs, which
is far too little, and recomputing would always seem cheap. There an op is put between two events, and their distance is
read once both have happened; nothing is waited for. A time belongs to the op's `Need` (op, shapes, dtypes), and only
the first few meetings are measured: an event costs microseconds. The least of these counts, because the first meeting
also loads the kernel, tunes it and takes its memory from the driver. The exception that does wait is a ranking of
victims in a step whose ops were never measured: launch times there would choose wrongly, and this happens once.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from torchdelta._torch_device import current_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.predict import Need
    from torchdelta.runtime.tape import OpEntry

__all__ = ["NUM_SAMPLES", "EventClock", "HostClock", "OpClock", "Timing"]

NUM_SAMPLES: Final = 4  # meetings of an op that are measured
_clock_s = time.perf_counter


class OpClock(Protocol):
    """Times ops one after the other."""

    def start(self, need: Need) -> Any:
        """Begin to time an op; returns what `stop` wants."""
        ...

    def stop(self, mark: Any, entry: OpEntry | None) -> float:
        """End it: the entry's `time_s` is set, now or when it is known. Returns the best answer so far, in seconds."""
        ...

    def poll(self, *, wait: bool = False) -> None:
        """Take in what has become known. `wait`: also wait for the ops of which nothing is known."""
        ...


class HostClock:
    """For devices on which an op has run when its call returns.

    Args:
        clock_s: Tells the seconds: by default of the wall; benchmarks on a busy machine read the thread's own.
    """

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s

    def start(self, need: Need) -> float:
        """Read the clock."""
        del need
        return self._clock_s()

    def stop(self, mark: float, entry: OpEntry | None) -> float:
        """Read it again."""
        time_s = self._clock_s() - mark
        if entry is not None:
            entry.time_s = time_s
        return time_s

    def poll(self, *, wait: bool = False) -> None:
        """Nothing is ever pending."""


class Timing:
    """What is known of the time that an op with some need takes."""

    __slots__ = ("is_known", "num_samples", "time_s", "waiting")

    def __init__(self) -> None:
        self.num_samples = 0
        self.is_known = False
        self.time_s = 0.0  # until it is known: the largest launch time
        self.waiting: list[weakref.ref[OpEntry]] = []  # entries whose time is a launch time so far

    def learn(self, time_s: float) -> None:
        """Take in a measured time, and tell the entries that wait for it."""
        self.time_s = min(self.time_s, time_s) if self.is_known else time_s
        self.is_known = True
        for reference in self.waiting:
            entry = reference()
            if entry is not None:
                entry.time_s = self.time_s
        self.waiting.clear()


class EventClock:
    """For accelerators. See [Note: times of asynchronous ops]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[Timing, torch.Event, torch.Event]] = deque()
        self._spare: list[torch.Event] = []

    def start(self, need: Need) -> tuple[Timing, torch.Event | None, float]:
        """Record an event where this is still to be measured."""
        timing = need.timing
        if timing is None:
            timing = need.timing = Timing()
        if timing.num_samples >= NUM_SAMPLES:
            return timing, None, 0.0
        timing.num_samples += 1
        event = self._event()
        event.record(current_stream(self.device))
        return timing, event, _clock_s()

    def stop(self, mark: tuple[Timing, torch.Event | None, float], entry: OpEntry | None) -> float:
        """Record the second event, and take in older ones that have happened meanwhile."""
        timing, first, start_s = mark
        if first is not None:
            if not timing.is_known:
                timing.time_s = max(timing.time_s, _clock_s() - start_s)
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
        """Read the pairs of events that have happened, oldest first; streams may end them in another order."""
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
