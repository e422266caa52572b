"""Storages that have a slot of the disk tier as their memory."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.parts import descriptor_of
from tests.runtime.tiers.storages import as_bytes, filled_storage, is_equal
from torchdelta.errors import TierError, TierIOError
from torchdelta.native.file_mapping import file_mapper
from torchdelta.runtime.tiers import mapped as mapped_slots
from torchdelta.runtime.tiers.disk import DiskTier
from torchdelta.runtime.tiers.memory import MemoryTier
from torchdelta.runtime.tiers.slots import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta.runtime.tiers.base import Slot

pytestmark = pytest.mark.skipif(file_mapper() is None, reason="needs the native modules")
MIB = 1 << 20


class Keeper:
    """Lives as long as a mapping."""


@pytest.fixture(params=["direct", "buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    """Open a tier with checksums, with direct I/O (where the file system has it) and without."""
    if request.param == "buffered":
        monkeypatch.setattr("torchdelta.runtime.tiers.scratch.set_direct", lambda _: False)
    tier = DiskTier(swap_dir=tmp_path, capacity_bytes=64 * MIB, checksum=True)
    yield tier
    tier.close()


def written(tier: DiskTier, content: torch.UntypedStorage) -> Slot:
    """Write a content to a new slot."""
    slot = tier.reserve(content.nbytes())
    tier.write(slot, content).wait()
    return slot


def mapped(tier: DiskTier, slot: Slot, keeper: object = None) -> torch.UntypedStorage:
    """Return a storage over a slot."""
    storage = torch.UntypedStorage(0)
    assert tier.map_into(slot, storage, keeper)
    return storage


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, 9_000_000])
def test_it_has_the_bytes_of_the_slot(disk: DiskTier, size_bytes: int) -> None:
    """Whole pages or not; at an address to which torch would align."""
    content = filled_storage(size_bytes, 1)
    storage = mapped(disk, written(disk, content))
    assert is_equal(storage, content)
    assert storage.data_ptr() % 64 == 0
    assert storage.resizable()
    assert not storage.is_shared()


def test_a_scattered_slot_is_one_range(disk: DiskTier) -> None:
    """The pieces of the file lie one after the other in memory."""
    slots = [disk.reserve(16 * MIB) for _ in range(4)]
    for slot in slots[::2]:
        disk.release(slot)
    content = filled_storage(32 * MIB - 5, 2)
    slot = written(disk, content)
    assert len(getattr(slot, "extents")) == 2  # noqa: B009
    assert is_equal(mapped(disk, slot), content)


def test_what_is_written_there_is_not_written_to_the_slot(disk: DiskTier) -> None:
    """Nor does another mapping of the slot see it."""
    content, target = filled_storage(100_000, 3), torch.UntypedStorage(100_000)
    slot = written(disk, content)
    first, second = mapped(disk, slot), mapped(disk, slot)
    as_bytes(first).fill_(1)
    disk.read(slot, target).wait()
    assert is_equal(target, content)
    assert is_equal(second, content)
    assert as_bytes(first).eq(1).all()


def test_its_keeper_lives_as_long_as_the_memory(disk: DiskTier) -> None:
    """Until the storage has another size, or dies."""
    content = filled_storage(100_000, 4)
    slot = written(disk, content)
    keepers = [Keeper(), Keeper()]
    alive = [weakref.ref(keeper) for keeper in keepers]
    first, second = (mapped(disk, slot, keeper) for keeper in keepers)
    keepers.clear()
    assert all(reference() is not None for reference in alive)
    first.resize_(200_000)
    assert as_bytes(first)[:100_000].equal(as_bytes(content))
    assert alive[0]() is None
    assert alive[1]() is not None
    del second
    assert alive[1]() is None


def space_bytes(descriptor: int) -> int:
    """Return the disk space of a file."""
    return os.fstat(descriptor).st_blocks * 512


def can_free(directory: Path) -> bool:
    """Return whether the file system frees the space of a part of a file."""
    mapper = file_mapper()
    assert mapper is not None
    with (directory / "probe").open("w+b", buffering=0) as file:
        file.write(bytes(2 * MIB))
        os.fsync(file.fileno())
        before_bytes = space_bytes(file.fileno())
        mapper.free_pieces(file.fileno(), [(0, MIB)])
        return space_bytes(file.fileno()) < before_bytes


@pytest.mark.parametrize("is_forked", [False, True])
def test_it_outlives_the_tier_and_all_else_in_the_file_is_freed(
    disk: DiskTier, tmp_path: Path, is_forked: bool
) -> None:
    """A scope closes its tier at its end, and the tensors live on. What a child has mapped stays."""
    if not can_free(tmp_path):
        pytest.skip("the file system cannot free a part of a file")
    contents = [filled_storage(10 * MIB, seed) for seed in range(2)]
    slots = [written(disk, contents[0]), written(disk, filled_storage(16 * MIB, 6)), written(disk, contents[1])]
    kept = [weakref.ref(slot) for slot in slots[::2]]
    storages = [mapped(disk, slots[0], slots[0]), mapped(disk, slots[2], slots[2])]
    slots.clear()
    if is_forked:
        mapped_slots._note_fork()  # noqa: SLF001 - before a fork
    descriptor = os.dup(descriptor_of(disk))
    try:
        before_bytes = space_bytes(descriptor)
        disk.close()
        closed_bytes = space_bytes(descriptor)
        assert before_bytes >= 36 * MIB
        assert closed_bytes <= 21 * MIB
        assert all(map(is_equal, storages, contents))
        storages.pop()
        last_bytes = space_bytes(descriptor)
        assert is_equal(storages[0], contents[0])
        if is_forked:
            assert last_bytes > closed_bytes - MIB
        else:
            assert last_bytes <= 11 * MIB
        storages.clear()
        assert (kept[0]() is None) or is_forked
    finally:
        os.close(descriptor)


def test_a_slot_that_a_child_has_is_not_freed_after_it_was_mapped_again(disk: DiskTier, tmp_path: Path) -> None:
    """By a survey before the fork, and at the scope's end after it."""
    if not can_free(tmp_path):
        pytest.skip("the file system cannot free a part of a file")
    slot = written(disk, filled_storage(4 * MIB, 1))
    storage = mapped(disk, slot, slot)
    mapped_slots._note_fork()  # noqa: SLF001
    storage.resize_(0)
    storage = mapped(disk, slot, slot)
    descriptor = os.dup(descriptor_of(disk))
    try:
        disk.close()
        storage.resize_(0)
        assert space_bytes(descriptor) >= 4 * MIB
    finally:
        os.close(descriptor)


def open_files() -> set[str]:
    """Return the numbers of the open files."""
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def test_nothing_of_it_stays_open(tmp_path: Path) -> None:
    """The file ends with its last mapping."""
    before = open_files()
    tier = DiskTier(swap_dir=tmp_path)
    storage = mapped(tier, slot := written(tier, filled_storage(100_000, 1)), slot)
    del slot
    tier.close()
    del tier
    assert any("(deleted)" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    del storage
    assert open_files() <= before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kept", "free"),
    [
        ([], [(0, 100)]),
        ([(0, 100)], []),
        ([(0, 10), (90, 10)], [(10, 80)]),
        ([(20, 10), (10, 10)], [(0, 10), (30, 70)]),
        ([(0, 50), (10, 10)], [(50, 50)]),
    ],
)
def test_what_is_between_the_mapped_parts(kept: list[tuple[int, int]], free: list[tuple[int, int]]) -> None:
    """In any order, side by side, and one inside another."""
    assert mapped_slots.between([Extent(*each) for each in kept], 100) == free


def test_what_cannot_be_read_is_not_mapped(disk: DiskTier) -> None:
    """Touching it would end the process."""
    slot = written(disk, filled_storage(100_000, 8))
    os.truncate(descriptor_of(disk), 8192)
    storage = torch.UntypedStorage(0)
    with pytest.raises(TierIOError, match="came back short"):
        disk.map_into(slot, storage, None)
    assert storage.nbytes() == 0


def test_a_flipped_bit_is_noticed(disk: DiskTier) -> None:
    """In any part, and a last one that is no whole page."""
    slot = written(disk, filled_storage(5_000_001, 9))
    for offset_bytes in (10, 5_000_000):
        with Path(f"/proc/self/fd/{descriptor_of(disk)}").open("r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset_bytes)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 16]), offset_bytes)
            os.fsync(file.fileno())
            with pytest.raises(TierIOError, match="checksum"):
                disk.map_into(slot, torch.UntypedStorage(0), None)
            os.pwrite(file.fileno(), bytes([byte]), offset_bytes)
            os.fsync(file.fileno())
    mapped(disk, slot)


def test_only_written_slots_that_are_not_released(disk: DiskTier) -> None:
    """As for reads."""
    slot = disk.reserve(5000)
    with pytest.raises(TierError, match="never written"):
        disk.map_into(slot, torch.UntypedStorage(0), None)
    disk.write(slot, filled_storage(5000, 1)).wait()
    disk.release(slot)
    with pytest.raises(TierError, match="after its release"):
        disk.map_into(slot, torch.UntypedStorage(0), None)


def test_memory_is_not_mapped() -> None:
    """The memory tier has its bytes in memory already."""
    tier = MemoryTier(capacity_bytes=None)
    slot = tier.reserve(5000)
    tier.write(slot, filled_storage(5000, 1)).wait()
    assert not tier.map_into(slot, torch.UntypedStorage(0), None)
    tier.close()
