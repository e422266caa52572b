"""The disk tier against a hostile world: bad directories, full and failing disks, sudden death."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.parts import descriptor_of
from tests.runtime.tiers.storages import as_bytes, filled_storage, is_equal
from torchdelta.errors import TierError, TierFullError, TierIOError
from torchdelta.runtime.tiers.disk import DiskMedium, DiskTier, _moves_in_place
from torchdelta.runtime.tiers.jobs import Part


@pytest.fixture(params=["direct", "buffered"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    """Open a tier with checksums, with direct I/O (where the file system has it) and without."""
    if request.param == "buffered":
        monkeypatch.setattr("torchdelta.runtime.tiers.scratch.set_direct", lambda _: False)
    tier = DiskTier(swap_dir=tmp_path, checksum=True)
    assert request.param == "direct" or not tier.direct
    yield tier
    tier.close()


def round_trip(tier: DiskTier, size_bytes: int) -> None:
    """Write and read, and compare."""
    content, target = filled_storage(size_bytes, size_bytes), torch.UntypedStorage(size_bytes)
    slot = tier.reserve(size_bytes)
    tier.write(slot, content)
    tier.read(slot, target).wait()
    assert is_equal(content, target)
    tier.release(slot)


def open_descriptors() -> set[str]:
    """Name the open files of this process."""
    links = [link for link in Path("/proc/self/fd").iterdir() if _is_open(int(link.name))]
    return {f"{link.name}:{link.readlink()}" for link in links}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("size_bytes", [0, 1, 511, 512, 4095, 4096, 4097, 9_000_000])
def test_any_size_survives_a_round_trip(disk: DiskTier, size_bytes: int) -> None:
    """Whole blocks or not."""
    round_trip(disk, size_bytes)
    assert disk.used_bytes == 0


def paged_storage(size_bytes: int, seed: int) -> torch.UntypedStorage:
    """Make a filled storage that begins at a page."""
    mapping = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    storage = mapping.untyped_storage()
    as_bytes(storage).copy_(as_bytes(filled_storage(size_bytes, seed)))
    assert storage.data_ptr() % mmap.PAGESIZE == 0
    return storage


@pytest.mark.parametrize("size_bytes", [65536, 9_000_000, 12 << 20])
@pytest.mark.parametrize("paged", ["source", "target", "both"])
def test_whole_pages_move_without_a_copy(
    disk: DiskTier, size_bytes: int, paged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a page-aligned storage is staged, except a last part that ends inside a page."""
    staged: list[str] = []
    for name in ("_stage", "_unstage"):
        real = getattr(DiskMedium, name)

        def note(medium: DiskMedium, part: Part, address: int, *, name: str = name, real: Any = real) -> None:
            staged.append(name)
            real(medium, part, address)

        monkeypatch.setattr(DiskMedium, name, note)
    source = (filled_storage if paged == "target" else paged_storage)(size_bytes, 1)
    target = (filled_storage if paged == "source" else paged_storage)(size_bytes, 2)
    slot = disk.reserve(size_bytes)
    disk.write(slot, source).wait()
    disk.read(slot, target).wait()
    assert is_equal(source, target)
    if disk.direct:
        num_parts = -(-size_bytes // disk.medium.part_bytes)
        num_odd = int(size_bytes % mmap.PAGESIZE != 0)
        for name, storage in (("_stage", source), ("_unstage", target)):
            is_paged = storage.data_ptr() % mmap.PAGESIZE == 0
            assert staged.count(name) == (num_odd if is_paged else num_parts)
    else:
        assert not staged


@pytest.mark.parametrize(
    ("system", "release", "expected"),
    [
        ("Linux", "5.8.0-generic", True),
        ("Linux", "6.18.44-fc", True),
        ("Linux", "5.15.153.1-microsoft-standard-WSL2", True),
        ("Linux", "5.7.19", False),
        ("Linux", "4.18.0-553.el8.x86_64", False),
        ("Linux", "unknown", False),
        ("Darwin", "23.1.0", False),
    ],
)
def test_kernels_on_which_parts_move_in_place(system: str, release: str, expected: bool) -> None:
    """From Linux 5.8 on: before, a fork during a direct read could lose bytes."""
    assert _moves_in_place(system, release) == expected


def test_on_other_kernels_every_part_is_staged(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages, too; the bytes are right."""
    monkeypatch.setattr("torchdelta.runtime.tiers.disk._MOVES_IN_PLACE", False)
    addresses: list[int] = []
    real = os.preadv

    def note(descriptor: int, views: list[memoryview], offset: int) -> int:
        addresses.extend(torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views)
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", note)
    source, target = paged_storage(65536, 1), paged_storage(65536, 2)
    slot = disk.reserve(65536)
    disk.write(slot, source)
    disk.read(slot, target).wait()
    assert is_equal(source, target)
    assert (target.data_ptr() in addresses) == (not disk.direct)


def test_calls_that_move_little_are_repeated(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short writes and short reads, whole blocks or not, end in the same bytes."""
    real_write, real_read = os.pwrite, os.preadv
    num_calls = 0

    def short_write(descriptor: int, view: memoryview, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        return real_write(descriptor, view[: max(4096, len(view) // 3 // 4096 * 4096)], offset)

    def short_read(descriptor: int, views: list[memoryview], offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        # What was read past the last whole block is read again under direct I/O.
        return max(real_read(descriptor, views, offset) * 2 // 3, 1 if len(views[0]) < 4096 else 4096)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    round_trip(disk, 300_000)
    assert num_calls > 4


@pytest.mark.parametrize(("function", "word"), [("pwrite", "write"), ("preadv", "read")])
def test_a_failing_disk_is_an_error_at_wait(
    disk: DiskTier, function: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO in a thread: told by wait, with the size; afterwards the tier works on."""
    slot = disk.reserve(50_000)
    disk.write(slot, filled_storage(50_000, 1)).wait()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    start = disk.write if word == "write" else disk.read
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(
            TierIOError, match=f"could not {word} a buffer of 50000 bytes: .*Input/output error"
        ) as info:
            start(slot, filled_storage(50_000, 1)).wait()
    assert isinstance(info.value.__cause__, OSError)
    assert "\n" not in str(info.value)
    round_trip(disk, 50_000)


@pytest.mark.parametrize(("function", "word"), [("pwrite", "write"), ("preadv", "read")])
def test_a_disk_that_moves_nothing_is_given_up(
    disk: DiskTier, function: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes back short is an error with numbers, never garbage and never an endless loop."""
    slot = disk.reserve(50_000)
    disk.write(slot, filled_storage(50_000, 1)).wait()
    start = disk.write if word == "write" else disk.read
    with monkeypatch.context() as patch:
        patch.setattr(os, function, lambda *_: 0)
        with pytest.raises(TierIOError, match=r"short: 0 of (50000|53248) bytes at offset 0"):
            start(slot, filled_storage(50_000, 1)).wait()
    round_trip(disk, 50_000)


def test_a_truncated_file_is_noticed(disk: DiskTier) -> None:
    """Bytes that are no longer there are an error."""
    slot = disk.reserve(100_000)
    disk.write(slot, filled_storage(100_000, 1)).wait()
    os.truncate(descriptor_of(disk), 8192)
    with pytest.raises(TierIOError, match="came back short"):
        disk.read(slot, torch.UntypedStorage(100_000)).wait()


def test_a_flipped_bit_is_noticed(disk: DiskTier) -> None:
    """With checksums on, one bit in 5 MB is an error that names the place."""
    slot = disk.reserve(5_000_000)
    disk.write(slot, filled_storage(5_000_000, 1)).wait()
    descriptor = descriptor_of(disk)
    with Path(f"/proc/self/fd/{descriptor}").open("r+b") as file:
        file.seek(4_500_000)
        byte = file.read(1)[0]
        file.seek(4_500_000)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(TierIOError, match=r"checksum of 80[0-9]{4} bytes at offset 4194304"):
        disk.read(slot, torch.UntypedStorage(5_000_000)).wait()


def test_without_checksums_nothing_is_kept(tmp_path: Path) -> None:
    """They are off by default, since they cost more than 2 % of a transfer."""
    tier = DiskTier(swap_dir=tmp_path)
    slot = tier.reserve(5000)
    tier.write(slot, filled_storage(5000, 1)).wait()
    assert slot.checksums == {}
    tier.close()


def test_the_file_has_no_name(disk: DiskTier, tmp_path: Path) -> None:
    """Nothing is seen in the directory, before and after."""
    round_trip(disk, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_nameless_files_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made and unlinked at once."""
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    tier = DiskTier(swap_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    round_trip(tier, 70_000)
    tier.close()


def test_names_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file has a name for a moment, one who was killed in it leaves an empty file: the next one removes it."""
    old, young, full, other = (
        tmp_path / name
        for name in ("torchdelta-old.swap", "torchdelta-young.swap", "torchdelta-full.swap", "mine.swap")
    )
    for path in (old, young, full, other):
        path.write_bytes(b"x" if path is full else b"")
        os.utime(path, None if path is young else (0, 0))
    monkeypatch.delattr(os, "O_TMPFILE")
    tier = DiskTier(swap_dir=tmp_path)
    tier.close()
    assert set(tmp_path.iterdir()) == {young, full, other}


def test_a_file_system_that_cannot_allocate_ahead_will_do(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is extended instead."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    round_trip(disk, 70_000)
    assert disk.pool_bytes >= 70_000


def test_a_full_disk_is_an_error_when_room_is_reserved(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a buffer is on its way; what fits still fits, and the file gives back what it took in vain."""
    real_allocate = os.posix_fallocate
    limit_bytes = 1 << 20

    def allocate(descriptor: int, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > limit_bytes:
            os.ftruncate(descriptor, limit_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")
        real_allocate(descriptor, offset, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    slot = disk.reserve(1_000_000)
    with pytest.raises(TierFullError, match=r"no room for 100000 bytes .*No space left on device in .*free some room"):
        disk.reserve(100_000)
    assert os.fstat(descriptor_of(disk)).st_size == disk.pool_bytes == 1_003_520
    disk.release(slot)
    round_trip(disk, 900_000)


_UNDER_A_LIMIT = """
import resource, sys
import torch
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
from torchdelta.errors import TierFullError
from torchdelta.runtime.tiers.disk import DiskTier
tier = DiskTier(swap_dir=sys.argv[1])
slot = tier.reserve(2_000_000)
try:
    tier.reserve(2_000_000)
except TierFullError as error:
    print(error)
source, target = torch.ones(250_000, dtype=torch.int64), torch.zeros(250_000, dtype=torch.int64)
tier.write(slot, source.untyped_storage()).wait()
tier.read(slot, target.untyped_storage()).wait()
print(torch.equal(source, target))
"""


def test_a_limit_of_the_kernel_is_a_full_tier(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, enforced for real."""
    run = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT, tmp_path], capture_output=True, text=True, check=True, timeout=120
    )
    message, verdict = run.stdout.splitlines()
    assert "the disk tier has no room for 2000000 bytes (" in message
    assert "used 2002944 bytes" in message
    assert verdict == "True"


_KILLED = """
import sys, time
import torch
from torchdelta.runtime.tiers.disk import DiskTier
tier = DiskTier(swap_dir=sys.argv[1])
storage = torch.ones(30_000_000, dtype=torch.uint8).untyped_storage()
slots = [tier.reserve(storage.nbytes()) for _ in range(3)]
for slot in slots:
    tier.write(slot, storage)
print("writing", flush=True)
while True:
    tier.write(slots[0], storage).wait()
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write."""
    process = subprocess.Popen([sys.executable, "-c", _KILLED, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir()) == []
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


_NEVER_CLOSED = """
import sys
import torch
from torchdelta.runtime.tiers.disk import DiskTier
tier = DiskTier(swap_dir=sys.argv[1])
storages = [torch.ones(9_000_000, dtype=torch.uint8).untyped_storage() for _ in range(8)]
transfers = [tier.write(tier.reserve(9_000_000), storage) for storage in storages]
"""


@pytest.mark.rest
def test_a_process_that_never_closes_ends_well(tmp_path: Path) -> None:
    """Copies in flight at the interpreter's exit: no crash, no message, no file."""
    run = subprocess.run(
        [sys.executable, "-c", _NEVER_CLOSED, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_back_descriptors_and_threads(tmp_path: Path) -> None:
    """As many as before, ten times over."""
    descriptors, num_threads = open_descriptors(), threading.active_count()
    for _ in range(10):
        tier = DiskTier(swap_dir=tmp_path)
        round_trip(tier, 100_000)
        assert len(open_descriptors()) == len(descriptors) + 1
        tier.close()
    assert open_descriptors() == descriptors
    assert threading.active_count() == num_threads


def _missing(path: Path) -> Path:
    return path / "none"


def _file(path: Path) -> Path:
    (path / "file").touch()
    return path / "file"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, "does not exist; create it, or name another"),
        (_file, "is not a directory; "),
        (lambda path: path / ("x" * 300), "cannot be used: "),
        (lambda _: Path("/proc"), "cannot be written: "),
    ],
)
def test_a_bad_directory_is_one_clear_line(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    """Missing, a file, unwritable: which directory, why, and what to change."""
    descriptors = open_descriptors()
    with pytest.raises(TierError, match=message) as info:
        DiskTier(swap_dir=make(tmp_path))
    text = str(info.value)
    assert repr(str(make(tmp_path))) in text
    assert "\n" not in text
    assert "TORCHDELTA_SWAP_DIR" in text
    assert open_descriptors() == descriptors


def test_the_directory_is_the_option_then_the_environment_then_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order."""
    places = [tmp_path / name for name in ("option", "environment", "system")]
    for place in places:
        place.mkdir()
    option, environment, system = places
    monkeypatch.setattr("tempfile.tempdir", str(system))
    monkeypatch.setenv("TORCHDELTA_SWAP_DIR", str(environment))
    found: list[Path] = []
    for swap_dir in (option, None):
        tier = DiskTier(swap_dir=swap_dir)
        found.append(tier.directory)
        tier.close()
    monkeypatch.delenv("TORCHDELTA_SWAP_DIR")
    tier = DiskTier()
    found.append(tier.directory)
    tier.close()
    assert found == places


@pytest.mark.parametrize("host_budget_bytes", [4096, 5000, 8192, 1 << 20, None])
def test_staging_stays_inside_the_host_budget(tmp_path: Path, host_budget_bytes: int | None) -> None:
    """Small budgets make small parts, and the same bytes."""
    tier = DiskTier(swap_dir=tmp_path, host_budget_bytes=host_budget_bytes)
    assert tier.staging_bytes <= (host_budget_bytes or 8 << 20)
    assert (tier.staging_bytes > 0) == tier.direct
    round_trip(tier, 123_457)
    tier.close()


def test_a_host_budget_below_one_block_is_refused(tmp_path: Path) -> None:
    """An error with both numbers, and no descriptor left open."""
    probe = DiskTier(swap_dir=tmp_path)
    probe.close()
    if not probe.direct:
        pytest.skip("no direct I/O here: no staging, nothing to refuse")
    descriptors = open_descriptors()
    with pytest.raises(TierError, match="host_budget of 100 bytes is less than the 4096 bytes"):
        DiskTier(swap_dir=tmp_path, host_budget_bytes=100)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("capacity_bytes", [0, 1, 4096, 10_000, 1 << 20])
def test_the_file_stays_inside_the_disk_budget(tmp_path: Path, capacity_bytes: int) -> None:
    """The file itself, not only the slots; a budget below a block holds nothing but empty slots."""
    tier = DiskTier(swap_dir=tmp_path, capacity_bytes=capacity_bytes)
    num_slots = 0
    try:
        while True:
            tier.reserve(4000)
            num_slots += 1
    except TierFullError:
        pass
    assert num_slots == capacity_bytes // 4096
    assert os.fstat(descriptor_of(tier)).st_size <= capacity_bytes
    assert tier.reserve(0).size_bytes == 0
    tier.close()


def test_a_second_tier_in_the_same_directory_is_another_file(tmp_path: Path) -> None:
    """Two budgets side by side do not meet."""
    first, second = DiskTier(swap_dir=tmp_path), DiskTier(swap_dir=tmp_path)
    slots = [(tier, tier.reserve(40_000), filled_storage(40_000, seed)) for seed, tier in enumerate((first, second))]
    for tier, slot, content in slots:
        tier.write(slot, content).wait()
    for tier, slot, content in slots:
        target = torch.UntypedStorage(40_000)
        tier.read(slot, target).wait()
        assert is_equal(target, content)
    assert not torch.equal(as_bytes(slots[0][2]), as_bytes(slots[1][2]))
    first.close()
    second.close()
