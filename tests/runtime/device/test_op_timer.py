"""Clocks of ops: the host's, and events that are read when they have happened."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch

from torchdelta.aten.facts import facts_of
from torchdelta.runtime.device import op_timer as optime
from torchdelta.runtime.device.op_timer import NUM_SAMPLES, EventTimer, HostTimer
from torchdelta.runtime.record.needs import Need
from torchdelta.runtime.state.buffer import OpEntry


class Queue:
    """A device that runs later what is queued now."""

    def __init__(self) -> None:
        self.queued: list[Event] = []
        self.num_events = 0
        self.clock_ms = 0.0

    def run(self, num_events: int, *, op_ms: float) -> None:
        """Reach so many events, with an op of this length before each."""
        for _ in range(num_events):
            self.clock_ms += op_ms
            self.queued.pop(0).at_ms = self.clock_ms


class Event:
    """An event of that device."""

    queue: Queue

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.at_ms: float | None = None
        Event.queue.num_events += 1

    def record(self, _stream: Any) -> None:
        self.at_ms = None
        Event.queue.queued.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def synchronize(self) -> None:
        while self.at_ms is None:
            Event.queue.run(1, op_ms=3.0)

    def elapsed_time(self, other: Event) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Give the clock events of a device that is run by hand."""
    Event.queue = Queue()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(optime, "current_stream", lambda _device: None)
    return Event.queue


def entry() -> OpEntry:
    """Make an entry of the tape."""
    func = torch.ops.aten.exp.default
    return OpEntry(func, facts_of(func), [], None)


def test_the_hosts_clock() -> None:
    """It measures from start to stop, and tells the entry."""
    clock, made = HostTimer(), entry()
    mark = clock.start(Need(0, 0))
    time.sleep(0.002)
    time_s = clock.stop(mark, made)
    assert made.time_s == time_s
    assert time_s >= 0.002


def test_a_time_is_known_when_its_events_have_happened(queue: Queue) -> None:
    """Until then the launch time stands in; afterwards the entry that waited has the measured one."""
    clock, need, made = EventTimer(torch.device("cpu")), Need(0, 0), entry()
    launch_s = clock.stop(clock.start(need), made)
    assert made.time_s == launch_s < 0.5
    clock.poll()
    assert made.time_s == launch_s
    queue.run(2, op_ms=700.0)
    clock.poll()
    assert made.time_s == pytest.approx(0.7)
    later = entry()
    assert clock.stop(clock.start(need), later) == pytest.approx(0.7)
    assert later.time_s == pytest.approx(0.7)


def test_the_least_of_the_first_few_meetings_counts(queue: Queue) -> None:
    """The first meeting loads and tunes; from then on nothing is recorded, so nothing is paid."""
    clock, need = EventTimer(torch.device("cpu")), Need(0, 0)
    for index in range(NUM_SAMPLES + 3):
        clock.stop(clock.start(need), None)
        queue.run(len(queue.queued), op_ms=900.0 if index == 0 else 10.0 + index)
    clock.poll()
    assert need.timing is not None
    assert need.timing.time_s == pytest.approx(0.011)
    assert need.timing.num_samples == NUM_SAMPLES
    # Events are used again.
    assert queue.num_events <= 4


def test_a_ranking_waits_for_what_was_never_measured_and_for_nothing_else(queue: Queue) -> None:
    """A poll that waits ends as soon as the ops still pending have a time."""
    clock, known, unknown = EventTimer(torch.device("cpu")), Need(0, 0), Need(0, 0)
    clock.stop(clock.start(known), None)
    queue.run(2, op_ms=5.0)
    clock.poll()
    clock.stop(clock.start(unknown), None)
    clock.stop(clock.start(known), None)
    clock.poll(wait=True)
    assert unknown.timing is not None
    assert unknown.timing.is_known
    assert len(queue.queued) == 2  # the second meeting of the known one is still under way


def test_no_entry_is_kept_alive(queue: Queue) -> None:
    """An op that is dropped while its time is unknown goes at once."""
    clock, need, made = EventTimer(torch.device("cpu")), Need(0, 0), entry()
    clock.stop(clock.start(need), made)
    reference = weakref.ref(made)
    del made
    assert reference() is None
    queue.run(2, op_ms=1.0)
    clock.poll()
