"""The arena: planned addresses for steps that repeat, and nobody's bytes touched whatever the plan or the step does."""

from __future__ import annotations

import array
import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native.steps import KIB, block, cut, is_full_of, settle
from tests.sampling import sample
from torchdelta.native.arena import arena_status, new_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdelta.native.arena import Arena


def test_a_step_that_repeats_is_placed_from_the_third_time_on(arena: Arena) -> None:
    """One step is recorded, the next shows what outlives it, and all that follow get their planned places."""
    addresses: list[list[int]] = []

    def step() -> None:
        first, second = block(100), block(50)
        del first
        third = block(80)
        addresses.append([second.data_ptr(), third.data_ptr()])

    settle(arena, step, 5)
    assert addresses[2] == addresses[3] == addresses[4]
    assert addresses[4][0] - addresses[4][1] == 100 * KIB  # the third took the place of the first
    figures = arena.figures()
    assert (figures["num_steps"], figures["num_planned_steps"], figures["num_plans"]) == (5, 3, 1)
    assert (figures["num_placed"], figures["num_clashes"], figures["num_outside"]) == (9, 0, 0)


def test_a_recording_tells_when_each_life_ends(arena: Arena) -> None:
    """Ends are counted in allocations; above the length they are in the next step; -1 goes beyond one round."""
    held: list[torch.Tensor] = []
    for _ in range(2):
        short = block(8)
        del short
        later = block(12)
        middle = block(16)
        if held:
            del held[0]  # the `later` of the step before, when there is a new one already: no one place for both
        held.append(later)
        del middle
        outliving = block(20)
        del later
        arena.cut()
    recording = arena.recording()
    assert recording is not None
    sizes, ends = (list(array.array("q", values)) for values in recording)
    assert sizes == [num * KIB for num in (8, 12, 16, 20)]
    assert ends == [1, -1, 3, -1]
    del outliving


def test_a_gradient_that_dies_early_in_the_next_step_wraps_around(arena: Arena) -> None:
    """Its life ends at the length of the step and so many allocations of the next."""
    gradient = None
    for _ in range(2):
        batch = block(8)
        gradient = None
        activation = block(16)
        gradient = block(24)
        del batch, activation
        arena.cut()
    recording = arena.recording()
    assert recording is not None
    assert list(array.array("q", recording[1])) == [3, 3, 4]
    assert gradient is not None


def test_a_step_that_differs_is_allocated_as_ever(arena: Arena) -> None:
    """From the first other size on nothing is placed; what was placed before keeps its bytes."""

    def step(sizes: Sequence[int]) -> None:
        held = [block(size, index) for index, size in enumerate(sizes)]
        assert all(is_full_of(tensor, index) for index, tensor in enumerate(held))

    settle(arena, lambda: step([10, 20, 30, 40]))
    num_placed = arena.figures()["num_placed"]
    step([10, 20, 31, 40])
    assert arena.figures()["num_placed"] == num_placed + 2
    assert arena.figures()["num_left_plans"] == 1
    cut(arena)
    step([10, 20, 30, 40])
    assert arena.figures()["num_placed"] == num_placed + 6


def test_each_signature_has_a_plan_of_its_own(arena: Arena) -> None:
    """Batches that change size, and steps that part ways in the middle, are all placed in the end."""
    kinds = ([10, 20, 30], [11, 21, 31], [10, 20, 35, 7])
    for number in range(30):
        held = [block(size, number) for size in kinds[number % 3]]
        assert all(is_full_of(tensor, number) for tensor in held)
        del held
        cut(arena)
    figures = arena.figures()
    assert figures["num_plans"] == 3
    assert figures["num_planned_steps"] >= 24


def test_the_number_of_plans_is_bounded(arena: Arena) -> None:
    """The plan that was not used for longest gives way, and only to a signature that has come before."""
    for number in range(12):
        block(10 + number)
        cut(arena)
    assert arena.figures()["num_plans"] == 4
    for _ in range(4):
        block(99)
        cut(arena)
    assert arena.figures()["num_plans"] == 4
    assert arena.figures()["num_planned_steps"] >= 1


def test_a_stream_that_never_repeats_is_soon_left_alone(arena: Arena) -> None:
    """Steps that begin alike and go on differently: plans are forgotten, and no more of them are made."""
    num_made = 0
    for number in range(80):
        held = [block(10, number), block(11 + number, number)]
        assert all(is_full_of(tensor, number) for tensor in held)
        del held
        num_made += cut(arena)
    figures = arena.figures()
    assert num_made == 16
    assert figures["num_planned_steps"] == 0
    assert figures["num_left_plans"] <= 2 * num_made
    assert figures["num_plans"] == 0
    assert figures["num_loose_steps"] <= 16
    settle(arena, lambda: [block(10), block(20)], 6)  # what repeats is placed all the same
    assert arena.figures()["num_planned_steps"] >= 2


def test_a_step_without_end_is_not_followed(arena: Arena) -> None:
    """Past the limit allocations are none of the arena's business."""
    for _ in range(3):
        for _ in range(1500):
            block(4)
        assert cut(arena) == 0
    assert arena.figures()["num_plans"] == 0


@pytest.mark.parametrize("place", [lambda sizes, _ends: [0] * len(sizes), lambda sizes, _ends: [64] * len(sizes)])
def test_a_wrong_plan_corrupts_nothing(
    arena: Arena, place: Callable[[Sequence[int], Sequence[int]], list[int]]
) -> None:
    """All at one address: the first one gets it, the others go outside while it lives."""
    for number in range(8):
        held = [block(size, size + number) for size in (10, 30, 20, 40)]
        del held[1]
        held.append(block(50, 50 + number))
        for size, tensor in zip((10, 20, 40, 50), held, strict=True):
            assert is_full_of(tensor, size + number)
        held.clear()
        cut(arena, place)
    assert arena.figures()["num_clashes"] > 0


def test_offsets_that_make_no_sense_are_refused(arena: Arena) -> None:
    """Of another length, not aligned or negative: nothing is taken over."""
    for _ in range(2):
        block(8)
        arena.cut()
    assert arena.recording() is not None
    for offsets in ([], [0, 64], [1], [-64], [2**62]):
        with pytest.raises(ValueError, match="offsets do not fit"):
            arena.plan(array.array("q", offsets).tobytes())
    assert arena.figures()["num_plans"] == 0


def test_what_outlives_its_step_is_never_overwritten(arena: Arena) -> None:
    """A tensor kept by surprise holds its place; whoever is planned there goes outside."""

    def step() -> list[torch.Tensor]:
        return [block(64, 7), block(32, 8)]

    settle(arena, step)
    kept = step()
    cut(arena)
    for _ in range(4):
        others = [block(64, 1), block(32, 2)]
        assert not {tensor.data_ptr() for tensor in kept} & {tensor.data_ptr() for tensor in others}
        del others
        cut(arena)
    assert is_full_of(kept[0], 7)
    assert is_full_of(kept[1], 8)


def test_storages_outlive_the_arena(arena: Arena) -> None:
    """After the stop they are valid; with the last of them the region is unmapped."""
    before_bytes = arena_status().figures.mapped_bytes
    held: list[torch.Tensor] = []
    for _ in range(3):
        held = [block(300, 5), block(300, 6)]
        if _ < 2:
            held.clear()
        cut(arena)
    assert arena.figures()["num_placed"] == 2
    arena.stop()
    assert arena_status().figures.mapped_bytes - before_bytes >= 600 * KIB
    assert is_full_of(held[0], 5)
    del held[0]
    assert is_full_of(held[0], 6)
    assert arena_status().figures.mapped_bytes - before_bytes >= 600 * KIB
    held.clear()
    assert arena_status().figures.mapped_bytes == before_bytes


def test_memory_goes_back_to_the_system(arena: Arena) -> None:
    """When a smaller plan or none takes over, free pages leave; so do all at the stop."""

    def step(num_kib: int) -> None:
        for _ in range(2):
            block(num_kib)

    large_kib = 128 * KIB
    settle(arena, lambda: step(large_kib))
    with_large = resident_kib()
    step(100)  # no plan begins so
    assert with_large - resident_kib() > large_kib // 2
    cut(arena)
    settle(arena, lambda: step(100))
    step(large_kib)
    cut(arena)
    with_large = resident_kib()
    step(100)
    assert with_large - resident_kib() > large_kib // 2
    cut(arena)
    step(large_kib)
    with_large = resident_kib()
    arena.stop()
    assert with_large - resident_kib() > large_kib // 2


def resident_kib() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") // KIB


def test_torch_uses_it_like_any_allocator(arena: Arena) -> None:
    """Resizing, cloning, raw allocations inside ops and memory events of the profiler."""

    def step() -> float:
        x = torch.ones(40_000)
        x.untyped_storage().resize_(80_000 * 4)
        y = torch.randn(64, 64).softmax(-1).clone()
        return x[:10].sum().item() + y.sum().item()

    expected = pytest.approx(74.0)
    for _ in range(5):
        assert step() == expected
        cut(arena)
    assert arena.figures()["num_placed"] > 0
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(events) == 0
    assert {160_000, 320_000, -320_000} <= set(events)


def test_it_can_be_started_again(arena: Arena) -> None:
    """A stopped arena has forgotten its plans, and learns anew."""
    for _ in range(3):
        settle(arena, lambda: block(30), 4)
        arena.stop()
        assert arena.figures()["num_plans"] == 0
        arena.start()
    assert arena.figures()["num_planned_steps"] == 6


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from([1, 4, 5, 8, 12, 64, 65, 300])),
        st.tuples(st.just("free"), st.integers(0, 30)),
    ),
    max_size=30,
)


@given(kinds=st.lists(ACTIONS, min_size=1, max_size=3), order=st.lists(st.integers(0, 2), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_two_living_blocks_ever_overlap(kinds: list[list[tuple[str, int]]], order: list[int], arena: Arena) -> None:
    """Any steps in any order, blocks that live for as long as they like: each keeps its pattern until it is freed."""
    alive: list[tuple[torch.Tensor, int]] = []
    number = 0
    for kind in order:
        for action, argument in kinds[kind % len(kinds)]:
            if action == "allocate":
                number += 1
                alive.append((block(argument, number), number))
                spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t, _ in alive)
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            elif alive:
                tensor, pattern = alive.pop(argument % len(alive))
                assert is_full_of(tensor, pattern)
        cut(arena)
    assert all(is_full_of(tensor, pattern) for tensor, pattern in alive)
    arena.stop()
    assert all(is_full_of(tensor, pattern) for tensor, pattern in alive)
    arena.start()


BETWEEN = """
import torch
from torchdelta.native.arena import arena_status, new_arena
from torchdelta.native.caching import caching_allocator
from torchdelta.native.counting import new_counter
for maker in (new_counter, new_arena, caching_allocator, new_arena):
    made = maker()
    assert not isinstance(made, Exception), made
assert arena_status().is_on, arena_status()
print("ok")
"""


def test_it_goes_on_below_the_caching_allocator() -> None:
    """A budget without an arena, which puts the caching allocator over it, may run between two with one."""
    done = subprocess.run([sys.executable, "-c", BETWEEN], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr


PROGRAM = """
import array, sys, torch
from torchdelta.native.arena import arena_status, new_arena
from torchdelta.native.counting import counting_status, new_counter
before = torch.ones(50_000)
made = {}
for name in sys.argv[1].split(","):
    made[name] = new_counter() if name == "counter" else new_arena()
    made[name].start()
    held = torch.ones(30_000)  # from before the other one
counter, arena = made["counter"], made["arena"]
del held, before
assert arena_status().is_on and counting_status().is_on, (arena_status(), counting_status())
start_bytes = counter.live_bytes()
for number in range(6):
    first, second = torch.ones(50_000), torch.ones(70_000)
    assert counter.live_bytes() - start_bytes == 480_000, counter.live_bytes()
    assert counter.owns(first.data_ptr())
    del first, second
    assert counter.live_bytes() == start_bytes
    arena.cut()
    while (recording := arena.recording()) is not None:
        length = len(recording[0]) // 8
        arena.plan(array.array("q", [i * 300_032 for i in range(length)]).tobytes())
assert arena.figures()["num_placed"] >= 6, arena.figures()
arena.stop()
counter.stop()
print("ok")
"""


@pytest.mark.parametrize("order", sample(["counter,arena", "arena,counter"], 1))
def test_it_lives_with_the_counting_allocator(order: str, arena: Arena) -> None:
    """In either order what is placed is counted to the byte, and what was there before either is freed rightly."""
    assert arena.figures()["num_steps"] == 0
    done = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr


def test_without_the_planning_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solvers need numba; without it there is no arena, and the message says what to install."""
    monkeypatch.delenv("TORCHDELTA_NATIVE", raising=False)
    monkeypatch.setattr("torchdelta.native.arena.importlib.util.find_spec", lambda _name: None)
    assert "torchdelta[plan]" in str(new_arena())
    assert arena_status().is_on is False
    assert "torchdelta[plan]" in arena_status().reason


def test_the_status_tells_figures(arena: Arena) -> None:
    """Totals of the process, by the names of the dataclass."""
    gc.collect()
    before = arena_status().figures
    settle(arena, lambda: block(30), 4)
    after = arena_status()
    assert (after.is_on, after.reason) == (True, "installed")
    assert after.figures.num_planned_steps - before.num_planned_steps == 2
    assert after.figures.num_plans - before.num_plans == 1
    assert after.figures.mapped_bytes - before.mapped_bytes >= 30 * KIB
