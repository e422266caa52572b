"""Random schedules on the tiers of a device with streams: nothing is used before it is there, no budget is passed.

The same schedules run on a real device in accelerator/test_tiers.py.
"""

import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.tiers.players import Player
from tests.runtime.tiers.simulated import SimulatedDevice, SimulatedEngine
from torchdelta.runtime.tiers.base import Tier
from torchdelta.runtime.tiers.bounced import BouncedDiskTier
from torchdelta.runtime.tiers.pinned import PinnedTier
from torchdelta.runtime.tiers.stacked import StackedTier

DEVICE_BYTES = 96 << 10
HOST_BYTES = 128 << 10
STAGING_BYTES = 16 << 10
DISK_BYTES = 160 << 10
NUM_STEPS = st.integers(10, 100)
LARGEST = st.sampled_from([2_000, 20_000, 40_000])
SEEDS = st.integers(0, 1 << 30)


def make_pinned(engine: SimulatedEngine, _: Path) -> Tier:
    """Open pinned host memory alone."""
    return PinnedTier(engine, capacity_bytes=HOST_BYTES)


def make_disk(engine: SimulatedEngine, directory: Path) -> Tier:
    """Open a disk behind two staging buffers of two pages each."""
    return BouncedDiskTier(
        engine, swap_dir=directory, capacity_bytes=DISK_BYTES, host_budget_bytes=STAGING_BYTES, checksum=True
    )


def make_both(engine: SimulatedEngine, directory: Path) -> Tier:
    """Open both, the disk behind a little of host memory."""
    return StackedTier(
        "disk", PinnedTier(engine, capacity_bytes=HOST_BYTES - STAGING_BYTES), make_disk(engine, directory)
    )


def num_open_files() -> int:
    """Count the descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def play(make, directory: Path, num_steps: int, largest_bytes: int, seed: int) -> SimulatedEngine:
    """Play one schedule, and look at what it left behind."""
    engine = SimulatedEngine(seed)
    device = SimulatedDevice(engine, DEVICE_BYTES)
    before = threading.active_count(), num_open_files()
    tier = make(engine, directory)
    try:
        Player(tier, device, seed).play(num_steps, largest_bytes)
    finally:
        tier.close()
    assert device.complaints == []
    assert (threading.active_count(), num_open_files()) == before
    assert engine.peak_pinned_bytes <= HOST_BYTES
    assert engine.pinned == {}
    return engine


@given(num_steps=NUM_STEPS, largest_bytes=LARGEST, seed=SEEDS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_schedule_of_pinned_memory_is_exact(num_steps: int, largest_bytes: int, seed: int) -> None:
    """Any order of calls, and any order in which the device does its work; the host is blocked by the close alone."""
    engine = play(make_pinned, Path(), num_steps, largest_bytes, seed)
    assert engine.num_host_waits == 2


@pytest.mark.parametrize("make", [make_disk, make_both])
@given(num_steps=NUM_STEPS, largest_bytes=LARGEST, seed=SEEDS)
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_schedule_of_a_disk_is_exact(make, tmp_path: Path, num_steps: int, largest_bytes: int, seed: int) -> None:
    """The same where the bytes bounce through staging buffers to a file, with pinned memory in front and without."""
    play(make, tmp_path, num_steps, largest_bytes, seed)
