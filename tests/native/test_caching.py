"""The caching allocator: blocks keep their content while pages are moved, and no more is held than was in use."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native.steps import KIB, block, is_full_of
from torchdelta import Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.caching import (
    CachingAllocator,
    caching_allocator,
    caching_figures,
    caching_status,
    release_kept,
)
from torchdelta.native.counting import new_counter

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * KIB
LEAST_KIB = 1024
MOST_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.fixture
def caching() -> Iterator[CachingAllocator]:
    """Turn the allocator on, with nothing in it."""
    new_counter()
    allocator = caching_allocator()
    if isinstance(allocator, NativeError):
        pytest.skip(f"no caching allocator here: {allocator}")
    allocator.start()
    yield allocator
    allocator.stop()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("caching")
def test_a_freed_block_is_used_again() -> None:
    """The same size gets the same pages, and nothing is mapped."""
    first = block(LEAST_KIB)
    address, fresh_bytes = first.data_ptr(), caching_figures().fresh_bytes
    del first
    second = block(LEAST_KIB, 2)
    assert second.data_ptr() == address
    assert caching_figures().fresh_bytes == fresh_bytes
    assert is_full_of(second, 2)


def test_the_peak_is_that_of_the_scope(caching: CachingAllocator) -> None:
    """What outlives a scope and is freed after it is no part of the next one's peak; a scope within one sees it all."""
    before = caching_figures().live_bytes
    held = block(16 * LEAST_KIB)
    caching.stop()
    del held
    caching.start()
    small = block(LEAST_KIB)
    assert caching_figures().peak_bytes == before + MIB
    del small
    caching.start()
    assert caching_figures().peak_bytes == before + MIB
    caching.stop()


@pytest.mark.usefixtures("caching")
def test_pages_of_small_blocks_make_a_large_one() -> None:
    """They lie apart, between blocks that live on, and are moved."""
    held = [block(LEAST_KIB, index) for index in range(16)]
    before = caching_figures()
    del held[::2]
    whole = block(8 * LEAST_KIB, 100)
    after = caching_figures()
    assert after.fresh_bytes == before.fresh_bytes
    assert after.moved_bytes - before.moved_bytes == 8 * MIB
    assert is_full_of(whole, 100)
    assert all(is_full_of(tensor, 2 * index + 1) for index, tensor in enumerate(held))


@pytest.mark.usefixtures("caching")
def test_neighbours_become_one() -> None:
    """What was cut up is whole again once all of it is free, whatever the order, and nothing is moved."""
    whole = block(12 * LEAST_KIB)
    del whole
    parts = [block(size * LEAST_KIB, size) for size in (1, 5, 2, 4)]
    before = caching_figures()
    assert all(is_full_of(part, size) for part, size in zip(parts, (1, 5, 2, 4), strict=True))
    for index in (2, 0, 0, 0):
        del parts[index]
    assert caching_figures().num_segments == 1
    again = block(12 * LEAST_KIB, 7)
    after = caching_figures()
    assert (after.fresh_bytes, after.moved_bytes) == (before.fresh_bytes, before.moved_bytes)
    assert is_full_of(again, 7)


@pytest.mark.usefixtures("caching")
def test_segments_do_not_become_more_with_every_step() -> None:
    """Steps that repeat cut the same pages again and again, at other places each time."""
    generator = random.Random(2)
    sizes = [generator.randrange(LEAST_KIB, 8 * LEAST_KIB) for _ in range(40)]
    num_segments: list[int] = []
    for _ in range(60):
        held: list[torch.Tensor] = []
        for size in sizes:
            held.append(torch.empty(size * KIB, dtype=torch.uint8))
            if len(held) > 12:
                held.pop(generator.randrange(len(held)))
        held.clear()
        num_segments.append(caching_figures().num_segments)
    assert max(num_segments) < 600  # about 250 in other draws; 1500 where runs are never joined, and growing


@pytest.mark.usefixtures("caching")
def test_only_what_is_missing_is_mapped() -> None:
    """A block that is larger than all that is kept takes that, and new pages for the rest."""
    kept = block(2 * LEAST_KIB)
    del kept
    fresh_bytes = caching_figures().fresh_bytes
    large = block(5 * LEAST_KIB, 3)
    figures = caching_figures()
    assert (figures.fresh_bytes - fresh_bytes, figures.kept_bytes) == (3 * MIB, 0)
    assert is_full_of(large, 3)


@pytest.mark.usefixtures("caching")
def test_kept_pages_can_be_released() -> None:
    """A library that has run out of memory cannot use them otherwise; live blocks stay."""
    living, freed = block(LEAST_KIB, 1), block(2 * LEAST_KIB, 2)
    del freed
    assert release_kept() == 2 * MIB
    assert (caching_figures().kept_bytes, caching_figures().live_bytes) == (0, MIB)
    assert is_full_of(living, 1)


@pytest.mark.usefixtures("caching")
def test_small_blocks_are_left_to_the_heap() -> None:
    """They are many, and it handles them well."""
    small = block(LEAST_KIB - 1)
    assert caching_figures().live_bytes == 0
    assert is_full_of(small, 1)


@pytest.mark.usefixtures("caching")
def test_resident_memory_follows_what_is_in_use() -> None:
    """Sizes that never fit what was freed are what a heap grows with."""
    generator = random.Random(0)
    held: list[torch.Tensor] = []
    before_bytes, most_bytes = resident_bytes(), 0
    for turn in range(300):
        held.append(block(generator.randrange(LEAST_KIB, 6 * LEAST_KIB), turn))
        while sum(tensor.nbytes for tensor in held) > 40 * MIB:
            held.pop(generator.randrange(len(held)))
        most_bytes = max(most_bytes, resident_bytes())
    assert most_bytes - before_bytes < 52 * MIB  # with one block above the 40, and rounded sizes
    assert caching_figures().peak_bytes < 52 * MIB


@pytest.mark.usefixtures("caching")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(-8, 5000), st.integers(0, 250)), max_size=40))
def test_blocks_keep_their_content(steps: list[tuple[int, int]]) -> None:
    """Whatever is allocated and freed in between; a negative number frees one of the blocks."""
    held: list[tuple[torch.Tensor, int]] = []
    most_live_bytes = caching_figures().live_bytes + caching_figures().kept_bytes
    for number, value in steps:
        if number >= 0:
            held.append((block(number + 1, value), value))
        elif held:
            held.pop(number % len(held))
        figures = caching_figures()
        most_live_bytes = max(most_live_bytes, figures.live_bytes)
        assert figures.live_bytes + figures.kept_bytes <= most_live_bytes
        assert all(is_full_of(tensor, value) for tensor, value in held)


@pytest.mark.usefixtures("caching")
def test_segments_stay_few_beside_blocks_that_live() -> None:
    """Linux allows some ten thousand mappings: a process that cuts its memory into pieces goes on all the same."""
    generator = random.Random(1)
    held: list[tuple[torch.Tensor, int]] = []
    most = 0
    for turn in range(4000):
        value = turn % 251
        held.append((block(generator.randrange(LEAST_KIB, 3 * LEAST_KIB), value), value))
        if len(held) > 60:
            tensor, value = held.pop(generator.randrange(len(held)))
            assert is_full_of(tensor, value)
        most = max(most, caching_figures().num_segments)
    assert most < 2000
    assert all(is_full_of(tensor, value) for tensor, value in held)


def test_it_is_on_as_often_as_it_was_started(caching: CachingAllocator) -> None:
    """Pages are unmapped when the last user stops; live blocks stay."""
    caching.start()
    living, freed = block(LEAST_KIB, 1), block(LEAST_KIB, 2)
    del freed
    caching.stop()
    assert caching_figures().kept_bytes == MIB
    caching.stop()
    try:
        assert (caching_figures().kept_bytes, caching_figures().live_bytes) == (0, MIB)
        assert is_full_of(living, 1)
        outside = block(LEAST_KIB)
        assert caching_figures().live_bytes == MIB
        del outside, living
        assert caching_figures().live_bytes == caching_figures().num_segments == 0
    finally:
        caching.start()


@pytest.mark.usefixtures("caching")
def test_threads_share_it() -> None:
    """Blocks are allocated and freed on several threads at once, and keep their content."""
    wrong: list[int] = []

    def work(number: int) -> None:
        generator = random.Random(number)
        held: list[tuple[torch.Tensor, int]] = []
        for turn in range(150):
            value = (17 * turn + number) % 251
            held.append((block(generator.randrange(LEAST_KIB, 4 * LEAST_KIB), value), value))
            if len(held) > 4:
                tensor, value = held.pop(generator.randrange(len(held)))
                if not is_full_of(tensor, value):
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.usefixtures("caching")
def test_a_forked_child_has_none() -> None:
    """Its blocks are there, new ones come from the heap, and the parent's stay as they are."""
    living, freed = block(LEAST_KIB, 5), block(LEAST_KIB, 6)
    del freed
    child = os.fork()
    if child == 0:
        figures = caching_figures()
        is_fine = is_full_of(living, 5) and figures.kept_bytes == 0 and figures.live_bytes == MIB
        own = torch.empty(2 * MIB, dtype=torch.uint8)
        is_fine &= caching_figures().live_bytes == MIB
        del own, living
        os._exit(0 if is_fine and caching_figures().live_bytes == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_full_of(living, 5)
    assert caching_figures().kept_bytes == MIB


def leave_mappings(num_spare: int) -> None:
    """Make so many mappings that the kernel allows only about `num_spare` more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    start = libc.mmap(None, MOST_MAPPINGS * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    # Every other page gets another protection, so each of these calls makes two mappings more.
    addresses = range(start + page, start + MOST_MAPPINGS * page, 2 * page)
    num_made = next(i for i, address in enumerate(addresses) if libc.mprotect(address, page, mmap.PROT_READ) != 0)
    for address in addresses[num_made - num_spare // 2 : num_made]:
        libc.mprotect(address, page, 0)


@pytest.mark.skipif(MOST_MAPPINGS > 1 << 17, reason="the kernel allows too many mappings to make them all")
@pytest.mark.skipif(
    not {"ASAN_OPTIONS", "TSAN_OPTIONS"}.isdisjoint(os.environ), reason="a sanitizer makes mappings, too"
)
def test_pages_that_cannot_be_moved_are_given_up(caching: CachingAllocator) -> None:
    """Where the kernel allows too few mappings, the block comes from the heap. What lives keeps its content."""
    moved, heap, wrong = range(3)
    codes: list[int] = []
    for num_spare in range(4, 16, 2):  # with fewer, the heap may have no memory for the block either
        child = os.fork()
        if child == 0:
            code = wrong
            try:  # whatever happens, the child must not go on as a second pytest
                torch.set_num_threads(1)  # a forked child has none of the threads
                caching.start()
                freed, living, freed_too = block(LEAST_KIB, 1), block(LEAST_KIB, 2), block(LEAST_KIB, 3)
                del freed, freed_too
                leave_mappings(num_spare)
                large = block(2 * LEAST_KIB, 4)
                figures = caching_figures()
                if is_full_of(large, 4) and is_full_of(living, 2) and not figures.kept_bytes:
                    code = {MIB: heap, 3 * MIB: moved}.get(figures.live_bytes, wrong)
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert set(codes) == {moved, heap}
    assert codes == sorted(codes, reverse=True)


def num_resident_pages(address: int, size_bytes: int) -> int:
    """Return how many pages of a range are in memory; 0 if it is not mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    found = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
    return sum(each & 1 for each in found) if libc.mincore(address, size_bytes, found) == 0 else 0


@pytest.mark.skipif(MOST_MAPPINGS > 1 << 17, reason="the kernel allows too many mappings to make them all")
@pytest.mark.skipif(
    not {"ASAN_OPTIONS", "TSAN_OPTIONS"}.isdisjoint(os.environ), reason="a sanitizer makes mappings, too"
)
def test_pages_are_given_back_where_they_cannot_be_unmapped(caching: CachingAllocator) -> None:
    """Unmapping the middle of a mapping makes two of it, which the kernel may not allow: its pages go all the same."""
    child = os.fork()
    if child == 0:
        code = 1
        try:  # whatever happens, the child must not go on as a second pytest
            torch.set_num_threads(1)  # a forked child has none of the threads
            caching.start()
            blocks = [block(LEAST_KIB, number) for number in range(1, 6)]
            address, size_bytes = blocks[2].data_ptr(), blocks[2].nbytes
            was_resident = num_resident_pages(address, size_bytes) == size_bytes // mmap.PAGESIZE
            leave_mappings(0)
            caching.stop()
            del blocks[2]
            is_gone = num_resident_pages(address, size_bytes) == 0
            code = 0 if was_resident and is_gone and all(map(is_full_of, blocks, (1, 2, 4, 5))) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("caching")
def test_resizing_keeps_the_content() -> None:
    """A storage that is emptied in place and filled again is a new block."""
    tensor = block(LEAST_KIB, 7)
    tensor.untyped_storage().resize_(3 * MIB)
    assert tensor.eq(7).all()
    tensor.untyped_storage().resize_(0)
    assert caching_figures().live_bytes == 0


def test_a_budget_turns_it_on() -> None:
    """And the end of its scope turns it off."""
    with MemoryBudget("1GiB"):
        if not caching_status().is_on:
            pytest.skip("no caching allocator here")
        living = torch.ones(2 * MIB)
        assert caching_figures().live_bytes == living.nbytes
    assert caching_figures().kept_bytes == 0
    assert living.eq(1).all()
    del living
    assert caching_figures().live_bytes == 0


def test_an_option_leaves_it_off() -> None:
    """All memory comes from the C library then."""
    with MemoryBudget("1GiB", Config(caching_allocator=False)):
        living = torch.ones(2 * MIB)
        assert caching_figures().live_bytes == 0
        assert living.eq(1).all()


SCRIPT = """
import os, torch
from pathlib import Path
from torch import nn
from torchdelta import MemoryBudget
from torchdelta.native.caching import caching_status

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def train(width, batch_size, budget):
    torch.manual_seed(0)
    most = 0.0
    def look(*_):
        nonlocal most
        most = max(most, resident_mib())
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.register_forward_hook(look)
        block[0].weight.register_post_accumulate_grad_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryBudget(budget) as scope:
        for _ in range(5):
            model(torch.randn(batch_size, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return most, scope.summary()

torch.set_num_threads(1)
train(32, 128, "800KiB")  # what is imported and allocated once
before = resident_mib()
most, summary = train(256, 8192, "320MiB")
assert summary.peak_bytes <= 320 * 2**20
assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
print(caching_status().is_on, most - before)
"""


@pytest.mark.rest
@pytest.mark.skipif("TSAN_OPTIONS" in os.environ, reason="the sanitizer's own memory is resident, too")
def test_resident_memory_of_a_training_stays_near_the_budget() -> None:
    """A process of its own: what it holds beyond the memory before the first step."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    is_on, grown_mib = done.stdout.split()
    if is_on != "True":
        pytest.skip("no caching allocator here")
    assert float(grown_mib) < 320 + 64
