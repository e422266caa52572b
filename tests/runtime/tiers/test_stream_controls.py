"""Negative controls: each rule of [Note: stream order] in pinned.py is broken on purpose, and the schedules notice."""

import contextlib
from pathlib import Path

import pytest

from tests.runtime.tiers.players import Player
from tests.runtime.tiers.simulated import Event, SimulatedDevice, SimulatedEngine
from torchdelta.runtime.tiers.bounced import BouncedDiskTier
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.pinned import PinnedSlot, PinnedTier, StreamTransfer

NUM_SCHEDULES = 600


class ForgetfulEngine(SimulatedEngine):
    """An engine that lets some waits fall under the table: of one queue for another."""

    def __init__(self, seed: int, *, waiting: Stream, awaited: Stream) -> None:
        super().__init__(seed)
        self.waiting = waiting
        self.awaited = awaited

    def follow(self, stream: Stream, event: Event) -> None:
        """Wait, unless it is the forgotten wait."""
        if (stream, event.queue) != (self.waiting, self.awaited.value):
            super().follow(stream, event)


class ImpatientEngine(SimulatedEngine):
    """An engine that tells the host that an event was reached before it was."""

    def finish(self, event: Event) -> None:
        """Return at once."""


class HastyTier(PinnedTier):
    """A tier that does not hold storages: a caller who drops one frees it under the copy."""

    def start_copy(self, *args, **kwargs) -> StreamTransfer:
        """Start it, and forget the storage."""
        transfer = super().start_copy(*args, **kwargs)
        transfer.drop_storage()
        transfer.is_over = False
        return transfer


class CarelessTier(PinnedTier):
    """A tier that says that a copy has left as soon as it was queued."""

    def write(self, *args) -> StreamTransfer:
        """Queue, and pretend."""
        transfer = super().write(*args)
        transfer.drop_storage()
        return transfer


class GreedyTier(PinnedTier):
    """A tier that hands a released slot on although a copy from it is under way."""

    def release(self, slot: PinnedSlot) -> None:
        """Release, and forget what is under way."""
        slot.last_read = None
        super().release(slot)


def is_noticed(make_engine, make_tier, num_schedules: int = NUM_SCHEDULES) -> bool:
    """Play schedules until one ends in a complaint."""
    for seed in range(num_schedules):
        engine = make_engine(seed)
        device = SimulatedDevice(engine, 96 << 10)
        tier = make_tier(engine, capacity_bytes=64 << 10)
        with contextlib.suppress(AssertionError):
            Player(tier, device, seed).play(40, 20_000)
        engine.settle()
        tier.close()
        if device.complaints:
            return True
    return False


def test_the_tier_as_it_is_gives_no_cause_for_complaint() -> None:
    """The control of the controls: the same schedules, nothing broken."""
    assert not is_noticed(SimulatedEngine, PinnedTier)


@pytest.mark.parametrize(
    ("waiting", "awaited"),
    [
        (Stream.OUT, Stream.COMPUTE),  # rule 1: content that is not made yet leaves
        (Stream.IN, Stream.COMPUTE),  # rule 1: a target that is still in use is filled
        (Stream.IN, Stream.OUT),  # rule 2: a slot is read before it is written
        (Stream.OUT, Stream.IN),  # rules 2 and 5: a slot is overwritten while it is read
        (Stream.COMPUTE, Stream.IN),  # rule 3: content is used before it is there
        (Stream.COMPUTE, Stream.OUT),  # rule 3: a source is overwritten before it has left
    ],
)
def test_a_forgotten_wait_is_noticed(waiting: Stream, awaited: Stream) -> None:
    """Without any one of the waits between streams, schedules fail."""
    assert is_noticed(lambda seed: ForgetfulEngine(seed, waiting=waiting, awaited=awaited), PinnedTier)


@pytest.mark.parametrize("make_tier", [HastyTier, CarelessTier, GreedyTier])
def test_memory_that_is_freed_or_reused_early_is_noticed(make_tier) -> None:
    """Rules 3, 4 and 5: a source or target that nobody holds, a slot that is handed on too early."""
    assert is_noticed(SimulatedEngine, make_tier)


@pytest.mark.parametrize(
    "make_engine",
    [
        lambda seed: ForgetfulEngine(seed, waiting=Stream.OUT, awaited=Stream.COMPUTE),
        lambda seed: ForgetfulEngine(seed, waiting=Stream.IN, awaited=Stream.COMPUTE),
        ImpatientEngine,
    ],
)
def test_a_forgotten_wait_on_the_way_to_a_disk_is_noticed(make_engine, tmp_path: Path) -> None:
    """The disk's threads need the waits for the compute stream, and their own for the device, too."""

    def make_tier(engine: SimulatedEngine, *, capacity_bytes: int) -> BouncedDiskTier:
        return BouncedDiskTier(engine, swap_dir=tmp_path, capacity_bytes=capacity_bytes, host_budget_bytes=8192)

    assert not is_noticed(SimulatedEngine, make_tier, num_schedules=20)
    assert is_noticed(make_engine, make_tier)
