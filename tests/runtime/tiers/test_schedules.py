"""Random schedules on every tier: content exact, counts exact, budgets never passed."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.tiers.media import ErraticMedium
from tests.runtime.tiers.storages import as_bytes, filled_storage, is_equal
from torchdelta.errors import TierFullError
from torchdelta.runtime.tiers.base import Tier, Transfer
from torchdelta.runtime.tiers.disk import DiskTier
from torchdelta.runtime.tiers.memory import MemoryTier
from torchdelta.runtime.tiers.pooled import PooledSlot, PooledTier

CAPACITY = 1 << 20

_SIZES = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([0, 1, 511, 512, 513, 4095, 4096, 4097, 100_000]),
    st.integers(0, 300_000),
)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read", "rewrite", "wait", "release"]), _SIZES), max_size=40
)


class Life:
    """A slot, what it should hold, and the reads of it that are under way."""

    def __init__(self, slot: PooledSlot, content: torch.UntypedStorage, transfer: Transfer) -> None:
        self.slot = slot
        self.content = content
        self.transfer = transfer
        self.reads: list[tuple[Transfer, torch.UntypedStorage]] = []

    def check(self) -> None:
        """Wait for the reads and compare."""
        for transfer, target in self.reads:
            transfer.wait()
            assert transfer.is_done()
            assert is_equal(target, self.content)
        self.reads.clear()


def play(tier: PooledTier, block_bytes: int, steps: list[tuple[str, int]], seed: int) -> None:
    """Do what the steps say, and hold the tier to its word after each."""
    rng = random.Random(seed)
    seeds = itertools.count()
    lives: list[Life] = []
    for action, size_bytes in steps:
        used_bytes = sum(-(-life.slot.size_bytes // block_bytes) * block_bytes for life in lives)
        if action == "write":
            need_bytes = -(-size_bytes // block_bytes) * block_bytes
            if used_bytes + need_bytes > CAPACITY:
                with pytest.raises(TierFullError, match=f"no room for {size_bytes} bytes: capacity {CAPACITY} bytes"):
                    tier.reserve(size_bytes)
                continue
            slot = tier.reserve(size_bytes)
            content = filled_storage(size_bytes, next(seeds))
            lives.append(Life(slot, content, tier.write(slot, content)))
        elif lives:
            life = rng.choice(lives)
            if action == "read":
                target = torch.UntypedStorage(life.slot.size_bytes)
                life.reads.append((tier.read(life.slot, target), target))
            elif action == "rewrite":
                life.check()
                life.content = filled_storage(life.slot.size_bytes, next(seeds))
                life.transfer = tier.write(life.slot, life.content)
            elif action == "wait":
                life.transfer.wait()
                assert life.transfer.wait() == 0.0
                life.check()
            else:
                tier.release(life.slot)  # with whatever is in flight
                tier.release(life.slot)
                lives.remove(life)
                life.check()
                life.transfer.wait()
        assert tier.used_bytes <= CAPACITY
        assert tier.pool_bytes <= CAPACITY
    for life in lives:
        life.check()
        target = torch.UntypedStorage(life.slot.size_bytes)
        tier.read(life.slot, target).wait()
        assert is_equal(target, life.content)
    for life in lives:
        life.transfer.wait()
    assert tier.used_bytes == sum(-(-life.slot.size_bytes // block_bytes) * block_bytes for life in lives)
    for life in lives:
        tier.release(life.slot)
    assert tier.used_bytes == 0


@pytest.mark.parametrize("make", [MemoryTier, DiskTier], ids=["memory", "disk"])
@given(steps=_STEPS, seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_any_schedule_is_exact(make: Callable[..., PooledTier], steps: list[tuple[str, int]], seed: int) -> None:
    """Writes, reads, rewrites and releases in any order, in flight or not."""
    tier = make(capacity_bytes=CAPACITY)
    try:
        play(tier, 4096 if tier.name == "disk" else 64, steps, seed)
        assert tier.used_bytes == 0
    finally:
        tier.close()


@given(steps=_STEPS, seed=st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None)
def test_any_schedule_is_exact_whatever_the_delays(steps: list[tuple[str, int]], seed: int) -> None:
    """Random delays in three threads: no two copies ever meet in the same bytes."""
    medium = ErraticMedium(seed)
    tier = PooledTier(medium, capacity_bytes=CAPACITY)
    try:
        play(tier, 64, [(action, size_bytes // 8) for action, size_bytes in steps], seed)
    finally:
        tier.close()
    assert medium.complaints == []


@pytest.mark.parametrize("checksum", [False, True])
def test_a_slot_in_pieces_keeps_its_content(*, checksum: bool) -> None:
    """A full and fragmented tier still takes what fits, in pieces, and returns it exactly."""
    tier = DiskTier(capacity_bytes=64 * 4096, checksum=checksum)
    try:
        slots = [tier.reserve(4096) for _ in range(64)]
        for slot in slots[::2]:
            tier.release(slot)
        content = filled_storage(32 * 4096 - 5, 1)
        slot = tier.reserve(content.nbytes())
        assert len(slot.extents) == 32
        target = torch.UntypedStorage(content.nbytes())
        tier.write(slot, content)
        tier.read(slot, target).wait()
        assert is_equal(target, content)
        with pytest.raises(TierFullError, match=r"capacity 262144 bytes, used 262144 bytes; raise disk_budget"):
            tier.reserve(1)
    finally:
        tier.close()


def test_large_storages_pass_through_many_parts(tmp_path: Path) -> None:
    """A storage of several parts and an odd size comes back exactly, beside others, from every tier."""
    for tier in (DiskTier(swap_dir=tmp_path), DiskTier(swap_dir=tmp_path, host_budget_bytes=5000), MemoryTier()):
        contents = [filled_storage(size_bytes, size_bytes) for size_bytes in (13_000_001, 4 << 20, 70_001)]
        slots = [tier.reserve(content.nbytes()) for content in contents]
        for slot, content in zip(slots, contents, strict=True):
            tier.write(slot, content)
        targets = [torch.UntypedStorage(content.nbytes()) for content in contents]
        reads = [tier.read(slot, target) for slot, target in zip(slots, targets, strict=True)]
        for read, target, content in zip(reads, targets, contents, strict=True):
            read.wait()
            assert is_equal(target, content)
        tier.close()
        assert tier.used_bytes == 0


def test_steps_that_repeat_do_not_grow_the_pool() -> None:
    """Slots are reused: twenty equal steps take no more of the machine than the first."""
    tier = MemoryTier()
    pools: list[int] = []
    for step in range(20):
        slots = [tier.reserve(size_bytes) for size_bytes in (3 << 20, 17, 5 << 20, 1 << 20) * 4]
        # Waited for, since the room of a slot that is released in the middle of a copy comes back a little later.
        for write in [tier.write(slot, torch.UntypedStorage(slot.size_bytes)) for slot in slots]:
            write.wait()
        for slot in random.Random(step).sample(slots, len(slots)):
            tier.release(slot)
        pools.append(tier.pool_bytes)
    assert pools[0] == pools[-1]
    assert tier.used_bytes == 0
    assert tier.peak_used_bytes == 4 * ((9 << 20) + 64)
    tier.close()


def test_tiers_meet_the_interface() -> None:
    """Both are a `Tier`, and their transfers a `Transfer`."""
    for tier in (DiskTier(), MemoryTier()):
        assert isinstance(tier, Tier)
        slot = tier.reserve(8)
        storage = filled_storage(8, 3)
        transfer = tier.write(slot, storage)
        assert isinstance(transfer, Transfer)
        assert transfer.size_bytes == 8
        transfer.wait()
        assert tier.write_bytes_per_s > 0.0
        assert tier.read_bytes_per_s > 0.0
        assert as_bytes(storage).numel() == 8
        tier.close()
