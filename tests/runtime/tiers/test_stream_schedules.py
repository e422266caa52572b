"""Random schedules on the tier of a device with streams: nothing is used before it is there, no budget is passed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.tiers.players import ACTIONS, Player
from tests.runtime.tiers.simulated import SimulatedDevice, SimulatedEngine
from torchdelta.runtime.tiers.pinned import PinnedTier

DEVICE_BYTES = 96 << 10
HOST_BYTES = 192 << 10
SIZES = st.one_of(st.sampled_from([0, 1, 511, 512, 513, 4096]), st.integers(0, 40_000))
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), SIZES), max_size=30)


@given(steps=STEPS, seed=st.integers(0, 1 << 30))
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_any_schedule_is_exact(steps: list[tuple[str, int]], seed: int) -> None:
    """Pinned host memory: any order of calls, any order in which the device does its work."""
    engine = SimulatedEngine(seed)
    device = SimulatedDevice(engine, DEVICE_BYTES)
    tier = PinnedTier(engine, capacity_bytes=HOST_BYTES)
    Player(tier, device, seed).play(steps)
    tier.close()
    assert engine.peak_pinned_bytes <= HOST_BYTES
    assert engine.pinned == {}
    assert device.complaints == []
