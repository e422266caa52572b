"""Tiers in processes that fork: children touch nothing, and the parent's bytes stay right."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchdelta.native.file_mapping import file_mapper

_IN_A_CHILD = """
import os, sys, warnings
import torch
warnings.simplefilter("ignore")
from tests.runtime.tiers.children import not_refused
from torchdelta.runtime.tiers.disk import DiskTier
from torchdelta.runtime.tiers.memory import MemoryTier

def bits(storage):
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())

for make in (lambda: DiskTier(swap_dir=sys.argv[1]), MemoryTier):
    tier = make()
    source = torch.full((20_000_000,), 3, dtype=torch.uint8).untyped_storage()
    slot = tier.reserve(source.nbytes())
    write = tier.write(slot, source)
    child = os.fork()  # with copies in flight
    if child == 0:
        verdict = not_refused((
            lambda: tier.reserve(10), lambda: tier.write(slot, source),
            lambda: tier.read(slot, torch.UntypedStorage(20_000_000)),
        ))
        verdict |= 8 * (tier.used_bytes != 0)
        verdict |= 16 * any("(deleted)" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                            if os.path.lexists(f"/proc/self/fd/{n}"))
        tier.release(slot)
        tier.close()
        del tier
        os._exit(verdict)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
    write.wait()
    target = torch.UntypedStorage(20_000_000)
    tier.read(slot, target).wait()
    print(bits(target) == bits(source), tier.used_bytes >= 20_000_000)
    tier.close()
"""


def _outputs(script: str, directory: Path) -> tuple[str, str]:
    """Run a script in a process of its own, with a directory as its argument. Return what it writes."""
    run = subprocess.run(
        [sys.executable, "-c", script, directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    return run.stdout, run.stderr


def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    """It is told so, holds no descriptor, and whatever it does, the parent's bytes stay right."""
    assert _outputs(_IN_A_CHILD, tmp_path) == ("0 True True\n0 True True\n", "")


_MAPPED_IN_A_CHILD = """
import os, sys, warnings
import torch
torch.set_num_threads(1)  # threads of OpenMP do not live on in a forked child, which would wait for them
warnings.simplefilter("ignore")
from torchdelta.runtime.tiers.disk import DiskTier

MIB = 1 << 20

def filled(value):
    return torch.full((4 * MIB,), value, dtype=torch.uint8).untyped_storage()

class Copy:
    def __init__(self, content):
        self.slot = tier.reserve(content.nbytes())
        tier.write(self.slot, content).wait()
    def __del__(self):
        tier.release(self.slot)

def mapped(value):
    copy, storage = Copy(filled(value)), torch.UntypedStorage(0)
    assert tier.map_into(copy.slot, storage, copy)
    return storage

tier = DiskTier(swap_dir=sys.argv[1], capacity_bytes=32 * MIB)
first, second = mapped(1), mapped(2)
go, ready = os.pipe()
child = os.fork()
if child == 0:
    os.read(go, 1)
    views = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (first, second)]
    is_open = any("(deleted)" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                  if os.path.lexists(f"/proc/self/fd/{n}"))
    os._exit(2 * is_open + (not all(bool(view.eq(value).all()) for view, value in zip(views, (1, 2)))))
first.resize_(0)
later = [Copy(filled(value)) for value in range(3, 9)]  # all of the room that is left
third = mapped(9) if tier.used_bytes < 32 * MIB else None
assert third is None
del second, later
tier.close()
os.write(ready, b"x")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(file_mapper() is None, reason="needs the native modules")
def test_a_forked_child_has_the_mapped_bytes_of_the_fork(tmp_path: Path) -> None:
    """What the parent empties, writes and frees later does not change them."""
    assert _outputs(_MAPPED_IN_A_CHILD, tmp_path) == ("0\n", "")


@pytest.mark.rest
def test_loader_workers_live_beside_a_tier(tmp_path: Path) -> None:
    """A DataLoader forks its workers while copies are in flight: batches and bytes are right."""
    script = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
from torchdelta.runtime.tiers.disk import DiskTier
tier = DiskTier(swap_dir=sys.argv[1])
sources = [torch.full((5_000_000,), n, dtype=torch.uint8) for n in range(6)]
slots = [tier.reserve(5_000_000) for _ in sources]
for slot, source in zip(slots, sources):
    tier.write(slot, source.untyped_storage())
total = 0
for batch in DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context="fork"):
    total += int(batch.sum())
    for slot, source in zip(slots, sources):
        target = torch.zeros(5_000_000, dtype=torch.uint8)
        tier.read(slot, target.untyped_storage()).wait()
        assert torch.equal(target, source)
print(total)
tier.close()
"""
    assert _outputs(script, tmp_path) == ("2016\n", "")


_FORKS = """
import os, sys, mmap, warnings
warnings.simplefilter("ignore")
import torch
from torchdelta.runtime.tiers.disk import DiskTier

SIZE = 16 << 20
tier = DiskTier(swap_dir=sys.argv[1])

def paged(value):
    tensor = torch.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    return tensor.fill_(value)

sources = [paged(n + 1) for n in range(3)]
slots = [tier.reserve(SIZE) for _ in sources]
for slot, source in zip(slots, sources):
    tier.write(slot, source.untyped_storage())
targets = [paged(0) for _ in sources]
for turn in range(12):
    for target in targets:
        target.fill_(0)
    reads = [tier.read(slot, target.untyped_storage()) for slot, target in zip(slots, targets)]
    child = os.fork()
    if child == 0:
        for target in targets:
            target.fill_(77)
        os._exit(0)
    for read, target, source in zip(reads, targets, sources):
        read.wait()
        assert torch.equal(target, source), turn
    os.waitpid(child, 0)
print("equal")
tier.close()
"""


def test_a_fork_during_reads_leaves_the_bytes_right(tmp_path: Path) -> None:
    """Parts are read in place where the file system has direct I/O, into private pages that a child then shares."""
    run = subprocess.run(
        [sys.executable, "-c", _FORKS, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.stdout, run.stderr) == ("equal\n", "")
