"""What the counter of an accelerator makes of its watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from torchdelta.runtime.device import counter as counter_module
from torchdelta.runtime.device.counter import DeviceCounter
from torchdelta.runtime.device.reserve import Reserve
from torchdelta.runtime.state.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.device_watch import DeviceWatch


class _Watch:
    """Counts what a test says, as native/device_watch.py does for CUDA."""

    def __init__(self) -> None:
        self.is_on = False
        self.counted_bytes = 0
        self.fails = False

    def live_bytes(self) -> int:
        return self.counted_bytes

    def set_live(self, size_bytes: int, counted_bytes: int) -> None:
        if self.fails:
            raise RuntimeError("another allocator is in place")
        self.is_on = True
        self.counted_bytes += size_bytes - counted_bytes

    def take_peak_bytes(self) -> int:
        return self.counted_bytes

    def clear_limit(self) -> None:
        pass


class _Device:
    """An allocator whose blocks are larger than what the watch counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active_bytes = 0
        self.watch = _Watch()
        monkeypatch.setattr(counter_module, "allocator_statistics", lambda _device: {"current": self.active_bytes})
        as_watch: Callable[[_Watch], DeviceWatch] = lambda watch: watch  # pyright: ignore[reportAssignmentType]  # noqa: E731
        self.counter = DeviceCounter(torch.device("cuda", 0), as_watch(self.watch))

    def allocate(self, size_bytes: int, rounding_bytes: int = 0) -> None:
        self.active_bytes += size_bytes + rounding_bytes
        self.watch.counted_bytes += size_bytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    """Return a device whose counter has been read once."""
    found = _Device(monkeypatch)
    found.allocate(1000)
    assert found.counter.live_bytes() == 1000
    assert found.counter.take_missed_bytes() == 0
    return found


def test_a_glance_has_all_but_the_rounding(device: _Device) -> None:
    """A reading corrects the count, and what it had missed is known afterwards."""
    device.allocate(500, rounding_bytes=30)
    assert device.counter.glance_bytes() == 1500
    assert device.counter.live_bytes() == device.counter.glance_bytes() == 1530
    assert device.counter.most_missed_bytes == 30


def test_what_several_readings_missed_is_added(device: _Device) -> None:
    """Whoever has the allocator read; it is taken once."""
    for rounding_bytes in (30, 20):
        device.allocate(500, rounding_bytes)
        device.counter.live_bytes()
        device.counter.live_bytes()
    assert device.counter.take_missed_bytes() == 50
    assert device.counter.take_missed_bytes() == 0
    assert 25 <= device.counter.most_missed_bytes <= 30


def test_without_a_watch_nothing_is_glanced_at(device: _Device) -> None:
    """Once torch no longer calls the watch, only readings count."""
    device.watch.fails = True
    device.allocate(500)
    assert device.counter.live_bytes() == 1500
    assert device.counter.glance_bytes() is None
    assert device.counter.take_missed_bytes() is None
    assert not device.counter.sees_peaks


def test_ops_that_are_not_recorded_are_seen_without_a_reading(device: _Device) -> None:
    """And they are no reason to reserve anything: the count had them."""
    usage, reserve = Usage(), Reserve()
    usage.count_with(device.counter)
    usage.ask_counter(fresh=True)
    reserve.add(usage, 0, 1 << 30)
    device.allocate(1 << 20)
    usage.ask_counter()
    assert usage.total_bytes == device.active_bytes
    usage.ask_counter(fresh=True)
    reserve.add(usage, 0, 1 << 30)
    assert usage.uncertain_bytes == 0
