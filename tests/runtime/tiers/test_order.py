"""Order, memory and failure, on a medium that copies only when the test lets it."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.runtime.tiers.media import ErraticMedium, ScriptedMedium
from tests.runtime.tiers.storages import filled_storage, is_equal
from torchdelta.errors import TierError, TierFullError, TierIOError
from torchdelta.runtime.tiers.base import Slot
from torchdelta.runtime.tiers.jobs import Job
from torchdelta.runtime.tiers.memory import MemoryTier
from torchdelta.runtime.tiers.pooled import PooledTier


@pytest.fixture
def medium() -> ScriptedMedium:
    """Make a medium with one thread that waits for permits."""
    return ScriptedMedium()


@pytest.fixture
def tier(medium: ScriptedMedium) -> Iterator[PooledTier]:
    """Open a tier on it."""
    tier = PooledTier(medium, capacity_bytes=4096)
    yield tier
    medium.open()
    tier.close()


def test_a_read_overtakes_queued_writes(tier: PooledTier, medium: ScriptedMedium) -> None:
    """What a step waits for goes before what it does not, and in the middle of a large write."""
    first, second, third = (tier.reserve(256 * n) for n in (1, 3, 1))
    medium.permits.release()
    tier.write(first, filled_storage(256, 1)).wait()
    tier.write(second, filled_storage(768, 2))
    tier.write(third, filled_storage(256, 3))
    medium.has_begun.acquire()
    medium.has_begun.acquire()  # the first part of the large write has begun
    tier.read(first, torch.UntypedStorage(256))
    medium.open()
    medium.has_begun.acquire()  # the next copy has begun, although nobody waits for it
    target = torch.UntypedStorage(256)
    tier.read(third, target).wait()
    kinds = [kind for kind, _ in medium.log[:3]]
    assert kinds == ["write", "write", "read"]
    assert is_equal(target, filled_storage(256, 3))


def test_a_read_takes_the_write_before_it_along(tier: PooledTier, medium: ScriptedMedium) -> None:
    """A read of a slot whose write is queued last makes that write go next."""
    slots = [tier.reserve(256) for _ in range(4)]
    for seed, slot in enumerate(slots):
        tier.write(slot, filled_storage(256, seed))
    medium.has_begun.acquire()
    target = torch.UntypedStorage(256)
    read = tier.read(slots[3], target)
    assert not read.is_done()
    medium.open()
    medium.has_begun.acquire()
    medium.has_begun.acquire()  # the next two copies have begun, although nobody waits for them
    read.wait()
    assert is_equal(target, filled_storage(256, 3))
    assert medium.log[:3] == [("write", 0), ("write", 3 * 256), ("read", 3 * 256)]


def test_what_a_caller_waits_for_goes_first(tier: PooledTier, medium: ScriptedMedium) -> None:
    """A write before the reads that are queued, and the last read before the others; also if parts of it are done."""
    slots = [tier.reserve(size_bytes) for size_bytes in (256, 256, 256, 768)]
    medium.permits.release(3)
    for slot in slots[:3]:
        tier.write(slot, filled_storage(256, 1)).wait()
    for _ in range(3):
        medium.has_begun.acquire()
    write = tier.write(slots[3], filled_storage(768, 2))
    medium.has_begun.acquire()  # its first part has begun
    reads = [tier.read(slot, torch.UntypedStorage(256)) for slot in slots[:3]]
    hurried, hurry = threading.Semaphore(0), tier.copier.hurry

    def note(job: Job) -> None:
        hurry(job)
        hurried.release()

    with mock.patch.object(tier.copier, "hurry", note):
        waiting = [threading.Thread(target=transfer.wait, daemon=True) for transfer in (write, reads[2])]
        for thread in waiting:
            thread.start()
            assert hurried.acquire(timeout=60)
    medium.open()
    for thread in waiting:
        thread.join()
    for read in reads:
        read.wait()
    starts = [slot.extents[0].offset_bytes for slot in slots]
    expected = [("read", starts[2]), ("write", starts[3] + 256), ("write", starts[3] + 512)]
    assert medium.log[3] == ("write", starts[3])
    assert medium.log[4:] == [*expected, ("read", starts[0]), ("read", starts[1])]


def test_writes_of_one_slot_stay_in_order(tier: PooledTier, medium: ScriptedMedium) -> None:
    """Write, read, write, read: each read sees the write before it."""
    slot = tier.reserve(512)
    targets = [torch.UntypedStorage(512) for _ in range(2)]
    reads = []
    for seed, target in enumerate(targets):
        tier.write(slot, filled_storage(512, seed))
        reads.append(tier.read(slot, target))
    medium.open()
    for seed, (read, target) in enumerate(zip(reads, targets, strict=True)):
        read.wait()
        assert is_equal(target, filled_storage(512, seed))


def test_a_released_slot_is_not_reused_while_a_copy_runs(tier: PooledTier, medium: ScriptedMedium) -> None:
    """Room comes back when the copy has ended, not before."""
    slot = tier.reserve(1024)
    tier.write(slot, filled_storage(1024, 1))
    medium.has_begun.acquire()
    tier.release(slot)
    assert tier.used_bytes == 1024
    other = tier.reserve(1024)
    assert set(other.extents).isdisjoint(slot.extents)
    medium.open()
    tier.write(other, filled_storage(1024, 2)).wait()
    assert tier.used_bytes == 1024


def test_a_full_tier_waits_for_slots_about_to_be_free(tier: PooledTier, medium: ScriptedMedium) -> None:
    """A reservation that only a running copy stands against is patient."""
    slot = tier.reserve(4096)
    tier.write(slot, filled_storage(4096, 1))
    medium.has_begun.acquire()
    tier.release(slot)
    opener = threading.Timer(0.05, medium.open)
    opener.start()
    assert tier.reserve(4096).size_bytes == 4096
    opener.join()


def test_the_write_of_a_released_slot_is_skipped(tier: PooledTier, medium: ScriptedMedium) -> None:
    """Bytes that nobody will read are not written, if nothing of them has been yet."""
    running, idle = tier.reserve(256), tier.reserve(256)
    tier.write(running, filled_storage(256, 1))
    medium.has_begun.acquire()
    skipped = tier.write(idle, filled_storage(256, 2))
    tier.release(idle)
    assert skipped.is_done()
    assert skipped.wait() == 0.0
    assert tier.used_bytes == 256
    medium.open()
    target = torch.UntypedStorage(256)
    tier.read(running, target).wait()
    assert [kind for kind, _ in medium.log] == ["write", "read"]


def test_a_storage_lives_as_long_as_its_copy(tier: PooledTier, medium: ScriptedMedium) -> None:
    """A caller who drops storage and transfer too early frees no memory under the copy."""
    slot = tier.reserve(256)
    storage = filled_storage(256, 7)
    alive = weakref.ref(storage)
    tier.write(slot, storage)
    del storage
    gc.collect()
    assert alive() is not None
    medium.open()
    target = torch.UntypedStorage(256)
    tier.read(slot, target).wait()
    tier.reserve(0)
    assert alive() is None
    assert is_equal(target, filled_storage(256, 7))


@pytest.mark.parametrize("ask", ["wait", "is_done"])
def test_a_finished_copy_holds_no_storage(ask: str) -> None:
    """After `wait` or `is_done` the caller's reference is the only one."""
    tier = PooledTier(ScriptedMedium(is_open=True), capacity_bytes=None)
    storage = filled_storage(256, 7)
    alive = weakref.ref(storage)
    transfer = tier.write(tier.reserve(256), storage)
    if ask == "wait":
        transfer.wait()
    else:
        while not transfer.is_done():
            pass
    del storage
    assert alive() is None
    tier.close()


def test_a_failed_write_is_told_by_wait_and_by_reads(tier: PooledTier, medium: ScriptedMedium) -> None:
    """The error comes from `wait`, each time; reads of the slot fail; a new write makes it good again."""
    medium.open()
    slot = tier.reserve(1024)
    medium.failing["write"] = OSError(5, "Input/output error")
    transfer = tier.write(slot, filled_storage(1024, 1))
    for _ in range(2):
        with pytest.raises(TierIOError, match=r"could not write a buffer of 1024 bytes: .*Input/output error"):
            transfer.wait()
    assert transfer.is_done()
    target = torch.UntypedStorage(1024)
    with pytest.raises(TierIOError, match="could not read a buffer of 1024 bytes"):
        tier.read(slot, target).wait()
    del medium.failing["write"]
    tier.write(slot, filled_storage(1024, 2))
    tier.read(slot, target).wait()
    assert is_equal(target, filled_storage(1024, 2))


def test_any_exception_in_a_thread_reaches_the_caller(tier: PooledTier, medium: ScriptedMedium) -> None:
    """Not OSErrors alone: a thread never dies and never leaves a caller waiting."""
    medium.open()
    slot = tier.reserve(512)
    tier.write(slot, filled_storage(512, 1)).wait()
    medium.failing["read"] = MemoryError("none left")
    with pytest.raises(TierIOError, match="none left"):
        tier.read(slot, torch.UntypedStorage(512)).wait()
    medium.failing.clear()
    assert tier.read(slot, torch.UntypedStorage(512)).wait() >= 0.0


def test_a_medium_that_cannot_grow_is_full() -> None:
    """The message has the numbers and the medium's own reason; smaller requests still find room."""
    tier = PooledTier(ScriptedMedium(is_open=True, limit_bytes=1000), capacity_bytes=None)
    tier.reserve(100)
    with pytest.raises(TierFullError, match=r"no room for 5000 bytes .*No space left.*unlimited, used 128 bytes"):
        tier.reserve(5000)
    tier.reserve(800)
    assert tier.used_bytes == 128 + 832
    tier.close()


def test_close_ends_what_is_queued(medium: ScriptedMedium) -> None:
    """Running copies end, queued ones fail, and nothing can be started any more."""
    tier = PooledTier(medium, capacity_bytes=None)
    slots = [tier.reserve(256) for _ in range(3)]
    transfers = [tier.write(slot, filled_storage(256, 0)) for slot in slots]
    medium.has_begun.acquire()
    waiting = tier.read(slots[2], torch.UntypedStorage(256))

    def open_once_it_closes() -> None:
        while not tier.copier.is_closing:
            time.sleep(1e-3)
        medium.open()

    opener = threading.Thread(target=open_once_it_closes)
    opener.start()
    tier.close()
    tier.close()
    opener.join()
    assert transfers[0].wait() == 0.0
    for transfer in (*transfers[1:], waiting):
        with pytest.raises(TierIOError, match="closed before"):
            transfer.wait()
    with pytest.raises(TierError, match="is closed"):
        tier.reserve(1)
    with pytest.raises(TierError, match="is closed"):
        tier.write(slots[0], filled_storage(256, 0))
    tier.release(slots[0])
    assert tier.used_bytes == 0
    assert medium.num_closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchdelta-scripted")]


def test_a_forgotten_tier_closes_itself() -> None:
    """Dropping the last reference ends the threads and the medium, also with copies queued."""
    medium = ErraticMedium(0, num_threads=2)
    tier = PooledTier(medium, capacity_bytes=None)
    for seed in range(50):
        tier.write(tier.reserve(700), filled_storage(700, seed))
    del tier
    gc.collect()
    assert medium.num_closed == 1
    assert medium.complaints == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchdelta-erratic")]


class _Owner:
    """Gives its slot back when it dies, as the runtime's handles do."""

    def __init__(self, tier: PooledTier, size_bytes: int) -> None:
        self.tier = tier
        self.slot = tier.reserve(size_bytes)
        self.cycle = self

    def __del__(self) -> None:
        self.tier.release(self.slot)


@pytest.mark.parametrize("which", ["tier", "copier"])
def test_a_release_waits_for_no_lock(tier: PooledTier, medium: ScriptedMedium, which: str) -> None:
    """The collector may call it on a thread that is inside the tier, and a lock taken twice would never open."""
    blocker, slot = tier.reserve(256), tier.reserve(256)
    tier.write(blocker, filled_storage(256, 0))
    medium.has_begun.acquire()
    tier.write(slot, filled_storage(256, 1))
    released = threading.Thread(target=tier.release, args=(slot,), daemon=True)
    with tier.lock if which == "tier" else tier.copier.lock:
        released.start()
        released.join(timeout=30)
        is_stuck = released.is_alive()
    assert not is_stuck
    medium.open()
    tier.read(blocker, torch.UntypedStorage(256)).wait()
    while tier.used_bytes > 256:
        time.sleep(1e-3)
    assert tier.used_bytes == 256


def test_finalizers_may_release_at_any_moment() -> None:
    """The collector runs inside the tier's own calls, with its locks held, on any thread: no deadlock, exact counts."""
    tier = PooledTier(ErraticMedium(1), capacity_bytes=None)
    threshold = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        for seed in range(300):
            owner = _Owner(tier, 100 + seed)
            tier.write(owner.slot, filled_storage(100 + seed, seed))
            if seed % 3 == 0:
                tier.read(owner.slot, torch.UntypedStorage(100 + seed)).wait()
            del owner
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    full = tier.reserve(64)
    tier.write(full, filled_storage(64, 0)).wait()
    while tier.used_bytes > 64:  # copies of the last ones may still run
        pass
    assert tier.used_bytes == 64
    tier.close()


def test_threads_may_share_a_tier() -> None:
    """Four threads at once: every byte right, every count exact."""
    tier = PooledTier(ErraticMedium(2), capacity_bytes=None)
    failures: list[str] = []

    def train(worker: int) -> None:
        for step in range(40):
            size_bytes = 1 + 97 * step % 1500
            slot = tier.reserve(size_bytes)
            content = filled_storage(size_bytes, 1000 * worker + step)
            target = torch.UntypedStorage(size_bytes)
            tier.write(slot, content)
            tier.read(slot, target).wait()
            tier.release(slot)
            if not is_equal(content, target):
                failures.append(f"thread {worker}, step {step}")

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.used_bytes == 0
    tier.close()


def test_misuse_is_refused() -> None:
    """Foreign slots, sizes that differ, reads before any write, use after release: an error that names it."""
    tier, other = MemoryTier(), MemoryTier()
    slot = tier.reserve(100)
    with pytest.raises(TierError, match="does not belong to this memory tier"):
        other.write(slot, filled_storage(100, 0))
    with pytest.raises(TierError, match="does not belong to this memory tier"):
        tier.release(Slot(8))
    with pytest.raises(TierError, match="storage has 99 bytes, but its slot has 100 bytes"):
        tier.write(slot, filled_storage(99, 0))
    with pytest.raises(TierError, match="never written"):
        tier.read(slot, torch.UntypedStorage(100))
    with pytest.raises(TierError, match="storages on cpu only"):
        tier.write(slot, torch.empty(100, dtype=torch.uint8, device="meta").untyped_storage())
    with pytest.raises(TierError, match="-1 bytes"):
        tier.reserve(-1)
    tier.release(slot)
    with pytest.raises(TierError, match="after its release"):
        tier.write(slot, filled_storage(100, 0))
    tier.close()
    other.close()
