"""What devices, hosts and disks do to transfers: an error from `wait`, the source untouched, nothing lost."""

import errno
import gc
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.tiers.players import Player
from tests.runtime.tiers.simulated import SimulatedDevice, SimulatedEngine
from torchdelta.errors import TierError, TierFullError, TierIOError
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer
from torchdelta.runtime.tiers.bounced import BouncedDiskTier
from torchdelta.runtime.tiers.memory import MemoryTier
from torchdelta.runtime.tiers.pinned import PinnedTier
from torchdelta.runtime.tiers.stacked import StackedTier


@pytest.fixture
def engine() -> SimulatedEngine:
    """Make an engine."""
    return SimulatedEngine(7)


@pytest.fixture
def device(engine: SimulatedEngine) -> Iterator[SimulatedDevice]:
    """Make a device that must not have had cause for complaint."""
    device = SimulatedDevice(engine, 1 << 20)
    yield device
    assert device.complaints == []


@pytest.fixture
def tier(engine: SimulatedEngine) -> Iterator[PinnedTier]:
    """Open a tier of 64 KiB."""
    tier = PinnedTier(engine, capacity_bytes=1 << 16)
    yield tier
    tier.close()
    assert engine.pinned == {}


def filled(device: SimulatedDevice, size_bytes: int, number: int = 1) -> torch.UntypedStorage:
    """Allocate and fill."""
    storage = device.allocate(size_bytes)
    assert storage is not None
    device.fill(storage, number)
    return storage


def assert_returns(tier: Tier, device: SimulatedDevice, slot: Slot, number: int = 1) -> None:
    """Read a slot back and have a kernel look at it."""
    target = device.allocate(slot.size_bytes)
    assert target is not None
    tier.read(slot, target).wait()
    device.check(target, number)
    device.settle()


def test_waiting_never_blocks_the_host(tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice) -> None:
    """Transfers of a device are waited for on the device, and the stall is told afterwards."""
    slot = tier.reserve(10_000)
    assert tier.write(slot, filled(device, 10_000)).wait() == 0.0
    for _ in range(20):
        assert_returns(tier, device, slot)
    assert engine.num_host_waits == 0
    assert tier.take_stall_s() > 0.0
    assert tier.take_stall_s() == 0.0
    assert tier.staging_bytes == 0


def test_bandwidths_are_measured_by_the_device(tier: PinnedTier, device: SimulatedDevice) -> None:
    """The estimates move from where they start to what the copies took."""
    slot = tier.reserve(60_000)
    before = (tier.write_bytes_per_s, tier.read_bytes_per_s)
    for number in range(300):
        tier.write(slot, filled(device, 60_000, number)).wait()
        assert_returns(tier, device, slot, number)
    assert tier.write_bytes_per_s != before[0]
    assert tier.read_bytes_per_s != before[1]


def test_a_refused_copy_out_leaves_the_source(
    tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice
) -> None:
    """The write says so in one line, reads of that slot fail as well, and another write mends it."""
    slot, storage = tier.reserve(5000), filled(device, 5000)
    engine.faults.copies = {0}
    transfer = tier.write(slot, storage)
    message = "the memory tier could not write a buffer of 5000 bytes: CUDA error: the simulated copy is refused$"
    for _ in range(2):
        with pytest.raises(TierIOError, match=message):
            transfer.wait()
    with pytest.raises(TierIOError, match="could not read a buffer of 5000 bytes: CUDA error"):
        tier.read(slot, torch.UntypedStorage(5000)).wait()
    device.check(storage, 1)
    tier.write(slot, storage).wait()
    assert_returns(tier, device, slot)


def test_a_copy_refused_in_the_middle_holds_its_storage(
    tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice
) -> None:
    """The pieces that were queued before still run: the memory goes back after them."""
    slots = [tier.reserve(4096) for _ in range(16)]
    for slot in slots[::2]:
        tier.release(slot)
    slot = tier.reserve(3 * 4096)
    assert len(slot.extents) == 3
    engine.faults.copies = {2}
    engine.random = random.Random(2)
    transfer = tier.write(slot, filled(device, slot.size_bytes))
    assert device.used_bytes == slot.size_bytes
    with pytest.raises(TierIOError, match="refused"):
        transfer.wait()
    assert device.used_bytes == 0
    assert_returns_after_rewrite = filled(device, slot.size_bytes, 5)
    tier.write(slot, assert_returns_after_rewrite).wait()
    assert_returns(tier, device, slot, 5)


def test_an_interrupt_in_the_middle_frees_nothing_under_a_copy(
    tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C while the second piece is queued: the first one is over before the storage can be freed."""
    for slot in [tier.reserve(4096) for _ in range(16)][::2]:
        tier.release(slot)
    slot = tier.reserve(2 * 4096)
    copy = engine.copy

    def interrupted(*args: object, **kwargs: int) -> None:
        if engine.num_copies == 1:
            raise KeyboardInterrupt
        copy(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.write(slot, filled(device, slot.size_bytes))
    assert device.used_bytes == 0
    tier.write(slot, filled(device, slot.size_bytes, 4)).wait()
    assert_returns(tier, device, slot, 4)


def test_a_refused_copy_in_can_be_repeated(tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice) -> None:
    """The slot keeps its content."""
    slot = tier.reserve(5000)
    tier.write(slot, filled(device, 5000)).wait()
    engine.faults.copies = {1}
    with pytest.raises(TierIOError, match="could not read a buffer of 5000 bytes"):
        tier.read(slot, filled(device, 5000, 2)).wait()
    assert_returns(tier, device, slot)


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    engine: SimulatedEngine, device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, once, and the bytes are right."""
    engine.faults.pins_from_bytes = 20 << 20
    tier = PinnedTier(engine, capacity_bytes=None)
    with caplog.at_level(logging.WARNING, "torchdelta"):
        for _ in range(5):
            tier.reserve(9 << 20)
            tier.write(tier.reserve(70_000), filled(device, 70_000)).wait()
    slot = tier.reserve(30_000)
    tier.write(slot, filled(device, 30_000, 3)).wait()
    assert_returns(tier, device, slot, 3)
    assert engine.peak_pinned_bytes <= 20 << 20
    assert [record.getMessage() for record in caplog.records] == [
        "host memory cannot be pinned (no more pages can be locked): copies from and to cpu are slower"
    ]
    tier.close()
    assert engine.pinned == {}


def test_a_host_without_memory_is_a_full_tier(
    tier: PinnedTier, engine: SimulatedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what the system said."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("torchdelta.runtime.tiers.arena.Segment", refuse)
    with pytest.raises(TierFullError, match=r"no room for 100 bytes \(.*Cannot allocate memory\).*free some room"):
        tier.reserve(100)
    with pytest.raises(TierError, match="the disk tier has no memory for staging: Cannot allocate memory"):
        BouncedDiskTier(engine, swap_dir=tmp_path)
    monkeypatch.undo()
    assert tier.reserve(100).size_bytes == 100
    assert sum(engine.pinned.values()) == tier.pool_bytes


@pytest.mark.parametrize("capacity_bytes", [0, 100, 4095, 4096, 10_000, 1 << 20])
def test_the_arena_stays_inside_the_host_budget(engine: SimulatedEngine, capacity_bytes: int) -> None:
    """What is pinned, not only what is used; whole pages of the budget can be used to the last block."""
    tier = PinnedTier(engine, capacity_bytes=capacity_bytes)
    num_slots = 0
    while tier.used_bytes + 512 <= (tier.capacity_bytes or 0):
        tier.reserve(500)
        num_slots += 1
    with pytest.raises(TierFullError, match="raise host_budget"):
        tier.reserve(1)
    assert num_slots == capacity_bytes // 4096 * 8
    assert engine.peak_pinned_bytes <= capacity_bytes
    assert tier.reserve(0).size_bytes == 0
    tier.close()


def test_sizes_are_not_rounded_to_powers_of_two(engine: SimulatedEngine) -> None:
    """A buffer a little above a power of two takes a block more than its size, and not twice its size."""
    tier = PinnedTier(engine, capacity_bytes=200 << 20)
    slots = [tier.reserve((33 << 20) + 100) for _ in range(6)]
    assert tier.used_bytes == 6 * ((33 << 20) + 512)
    assert engine.peak_pinned_bytes <= 200 << 20
    assert len(slots) == 6
    tier.close()


def test_a_failed_device_is_told_and_shut_down(
    tier: PinnedTier, engine: SimulatedEngine, device: SimulatedDevice
) -> None:
    """After a failure of the device itself every call tells it, and closing still gives the memory back."""
    slot = tier.reserve(5000)
    storage = filled(device, 5000)
    transfer = tier.write(slot, storage)
    engine.faults.is_broken = True
    with pytest.raises(TierIOError, match="the simulated device has failed"):
        transfer.wait()
    with pytest.raises(TierIOError, match="the simulated device has failed"):
        tier.write(slot, storage).wait()
    tier.drain()
    assert tier.take_stall_s() >= 0.0
    tier.close()
    engine.faults.is_broken = False
    assert len(engine.pinned) == 1  # the device is gone, and with it what it knew
    engine.pinned.clear()


def test_a_tier_that_nobody_closes_gives_its_memory_back(engine: SimulatedEngine, device: SimulatedDevice) -> None:
    """With transfers under way."""
    tier = PinnedTier(engine, capacity_bytes=1 << 16)
    tier.write(tier.reserve(5000), filled(device, 5000))
    assert engine.pinned
    del tier
    gc.collect()
    assert engine.pinned == {}
    assert device.used_bytes == 0


def test_a_closed_tier_refuses_and_its_transfers_end(tier: PinnedTier, device: SimulatedDevice) -> None:
    """Closing waits for what is under way."""
    slot = tier.reserve(5000)
    transfer = tier.write(slot, filled(device, 5000))
    tier.close()
    tier.close()
    assert transfer.is_done()
    assert transfer.wait() == 0.0
    assert device.used_bytes == 0
    tier.release(slot)
    assert tier.used_bytes == 0
    for use in (lambda: tier.reserve(1), lambda: tier.write(slot, torch.UntypedStorage(5000))):
        with pytest.raises(TierError, match="the memory tier is closed"):
            use()


def test_misuse_is_refused(tier: PinnedTier, device: SimulatedDevice) -> None:
    """Foreign slots and devices, sizes that differ, reads before any write, use after release."""
    slot, storage = tier.reserve(100), filled(device, 100)
    with pytest.raises(TierError, match="does not belong to this memory tier"):
        tier.write(MemoryTier().reserve(100), storage)
    with pytest.raises(TierError, match="does not belong to this memory tier"):
        tier.release(Slot(100))
    with pytest.raises(TierError, match="storage has 99 bytes, but its slot has 100 bytes"):
        tier.write(slot, filled(device, 99))
    with pytest.raises(TierError, match="never written"):
        tier.read(slot, storage)
    with pytest.raises(TierError, match="copies storages on cpu only, not one on meta"):
        tier.write(slot, torch.empty(100, dtype=torch.uint8, device="meta").untyped_storage())
    with pytest.raises(TierError, match="-1 bytes"):
        tier.reserve(-1)
    tier.release(slot)
    with pytest.raises(TierError, match="after its release"):
        tier.write(slot, storage)


def test_tiers_of_a_device_meet_the_interface(engine: SimulatedEngine, tmp_path: Path) -> None:
    """All three are a `Tier`, and their transfers a `Transfer`."""
    device = SimulatedDevice(engine, 1 << 20)
    pinned, disk = PinnedTier(engine, capacity_bytes=None), BouncedDiskTier(engine, swap_dir=tmp_path)
    stacked = StackedTier("disk", pinned, disk)
    for tier in (pinned, disk, stacked):
        assert isinstance(tier, Tier)
        slot = tier.reserve(8)
        transfer = tier.write(slot, filled(device, 8))
        assert isinstance(transfer, Transfer)
        assert transfer.size_bytes == 8
        transfer.wait()
    with pytest.raises(TierError, match="does not belong to this disk tier"):
        stacked.write(disk.reserve(8), filled(device, 8))
    with pytest.raises(TierError, match="copies storages on cpu only, not one on meta"):
        disk.write(disk.reserve(8), torch.empty(8, dtype=torch.uint8, device="meta").untyped_storage())
    stacked.close()
    assert engine.pinned == {}
    assert device.complaints == []


def test_what_the_host_cannot_hold_goes_to_the_disk(
    engine: SimulatedEngine, device: SimulatedDevice, tmp_path: Path
) -> None:
    """Both budgets are used to the last block, and then the disk's name is in the error."""
    disk = BouncedDiskTier(engine, swap_dir=tmp_path, capacity_bytes=1 << 15, host_budget_bytes=8192)
    tier = StackedTier("disk", PinnedTier(engine, capacity_bytes=1 << 14), disk)
    assert tier.capacity_bytes == (1 << 15) + (1 << 14)
    assert tier.staging_bytes == 8192
    slots = [tier.reserve(4096) for _ in range(12)]
    fast = tier.first.read_bytes_per_s
    assert tier.read_bytes_per_s != fast
    with pytest.raises(TierFullError, match=r"the disk tier has no room for 4096 bytes.*raise disk_budget"):
        tier.reserve(4096)
    for number, slot in enumerate(slots):
        tier.write(slot, filled(device, 4096, number)).wait()
    for number, slot in enumerate(slots):
        assert_returns(tier, device, slot, number)
    assert engine.peak_pinned_bytes <= (1 << 14) + 8192
    tier.release(slots[0])
    assert tier.reserve(4096) is not None
    assert tier.read_bytes_per_s == tier.first.read_bytes_per_s
    tier.close()


@pytest.mark.parametrize(("function", "word"), [("pwrite", "write"), ("preadv", "read")])
def test_a_failing_disk_leaves_the_source(
    engine: SimulatedEngine,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    word: str,
) -> None:
    """A full or broken disk, and a file that comes back short, are errors of that transfer alone."""
    tier = BouncedDiskTier(engine, swap_dir=tmp_path, host_budget_bytes=8192)
    slot, storage = tier.reserve(50_000), filled(device, 50_000)
    tier.write(slot, storage).wait()

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for patched, reason in ((fail, "No space left on device"), (lambda *_: 0, "short: 0 of 4096 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, patched)
            transfer = tier.write(slot, storage) if word == "write" else tier.read(slot, filled(device, 50_000, 2))
            with pytest.raises(TierIOError, match=f"could not {word} a buffer of 50000 bytes: .*{reason}"):
                transfer.wait()
    device.check(storage, 1)
    tier.write(slot, storage).wait()
    assert_returns(tier, device, slot)
    tier.close()
    assert engine.pinned == {}


def test_a_refused_copy_fails_the_disk_transfer_alone(
    engine: SimulatedEngine, device: SimulatedDevice, tmp_path: Path
) -> None:
    """What the device says in a thread of the disk is told by `wait`."""
    tier = BouncedDiskTier(engine, swap_dir=tmp_path, host_budget_bytes=8192)
    slot, storage = tier.reserve(50_000), filled(device, 50_000)
    engine.faults.copies = {3}
    with pytest.raises(TierIOError, match="the disk tier could not write a buffer of 50000 bytes: CUDA error"):
        tier.write(slot, storage).wait()
    tier.write(slot, storage).wait()
    assert_returns(tier, device, slot)
    tier.close()


@given(num_steps=st.integers(10, 80), seed=st.integers(0, 1 << 30), rate=st.sampled_from([0.05, 0.3]))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_schedules_with_failing_copies_lose_nothing(tmp_path: Path, num_steps: int, seed: int, rate: float) -> None:
    """Copies refused at random, to memory and to the disk: what could not leave stays, and the bytes are right."""
    rng = random.Random(seed)
    engine = SimulatedEngine(seed)
    engine.faults.copies = {number for number in range(3000) if rng.random() < rate}
    device = SimulatedDevice(engine, 96 << 10)
    disk = BouncedDiskTier(engine, swap_dir=tmp_path, capacity_bytes=160 << 10, host_budget_bytes=64 << 10)
    tier = StackedTier("disk", PinnedTier(engine, capacity_bytes=64 << 10), disk)
    Player(tier, device, seed, can_fail=True).play(num_steps, 20_000)
    tier.close()


def test_threads_share_a_tier(engine: SimulatedEngine, device: SimulatedDevice, tmp_path: Path) -> None:
    """Several threads at once, as the autograd engine has one for each device."""
    disk = BouncedDiskTier(engine, swap_dir=tmp_path, host_budget_bytes=64 << 10)
    tier = StackedTier("disk", PinnedTier(engine, capacity_bytes=64 << 10), disk)
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            Player(tier, device, seed, is_alone=False).play(100, 20_000)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    tier.drain()
    assert (tier.used_bytes, device.used_bytes) == (0, 0)
    tier.close()


_FORKING = """
import os
from tests.runtime.tiers.children import not_refused
from tests.runtime.tiers.simulated import SimulatedDevice, SimulatedEngine
from torchdelta.runtime.tiers.pinned import PinnedTier

engine = SimulatedEngine(3)
device = SimulatedDevice(engine, 1 << 16)
tier = PinnedTier(engine, capacity_bytes=1 << 16)
storage = device.allocate(5000)
device.fill(storage, 1)
slot = tier.reserve(5000)
transfer = tier.write(slot, storage)
child = os.fork()
if child == 0:
    engine.faults.is_broken = True  # whoever asks the device is told off
    verdict = not_refused((
        lambda: tier.reserve(10), lambda: tier.write(slot, storage), lambda: tier.read(slot, storage),
    ))
    verdict |= 8 * (tier.used_bytes != 0 or tier.take_stall_s() != 0.0)
    tier.release(slot)
    tier.close()
    verdict |= 16 * (len(engine.pinned) != 1)
    os._exit(verdict)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
target = device.allocate(5000)
tier.read(slot, target).wait()
device.check(target, 1)
device.settle()
tier.close()
print(device.complaints, engine.pinned)
"""


def test_a_forked_child_touches_nothing() -> None:
    """It is told so, and the parent's bytes stay right whatever the child does."""
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", _FORKING], capture_output=True, text=True, check=False, timeout=120, cwd=root
    )
    assert (run.stdout, run.stderr) == ("0\n[] {}\n", "")
