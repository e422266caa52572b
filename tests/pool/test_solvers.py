"""Every solver: right placements, honest bounds, the same answer again."""

import random
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.instances import guillotine, instance_of, is_free_of_overlap, random_lives
from tests.sampling import sample
from torchdelta.errors import PoolError
from torchdelta.pool import corner, greedy, portfolio
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.csv_file import capacity_in_name, read_instance
from torchdelta.pool.model import make_instance
from torchdelta.pool.sections import cut
from torchdelta.pool.solvers import BASELINES, SOLVERS, quick_baselines, solve
from torchdelta.pool.validate import check, find_fault

CHALLENGING = sorted(Path("../shared/data/minimalloc").glob("?.*.csv"))


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=60, deadline=None)
@given(lives=random_lives(14), alignment=st.sampled_from([1, 8, 512]))
def test_nothing_overlaps_and_everything_is_aligned(solver, lives, alignment):
    """By the validator and by comparing every pair; the footprint is never below the load."""
    instance = instance_of(lives, alignment_bytes=alignment)
    placement = solve(instance, solver)
    check(instance, placement.offsets_bytes)
    assert is_free_of_overlap(instance, placement.offsets_bytes)
    assert placement.footprint_bytes >= placement.lower_bound_bytes >= 0
    assert placement.footprint_bytes >= max_load_bytes(instance)
    assert placement.proved_optimal == (placement.footprint_bytes <= placement.lower_bound_bytes)


@settings(max_examples=60, deadline=None)
@given(lives=random_lives(12), seed=st.integers(0, 1 << 30))
def test_any_permutation_can_be_placed(lives, seed):
    """The order of the input is nobody's promise."""
    order = np.random.default_rng(seed).permutation(len(lives))
    instance = instance_of([lives[position] for position in order])
    assert find_fault(instance, solve(instance).offsets_bytes) is None


@given(lives=random_lives(12), more=random_lives(1))
def test_another_life_never_lowers_the_bound(lives, more):
    """The load only grows."""
    assert max_load_bytes(instance_of(lives + more)) >= max_load_bytes(instance_of(lives))


@settings(max_examples=200, deadline=None)
@given(lives=random_lives(5, most_bytes=5, least_bytes=1))
def test_the_default_is_optimal_on_small_instances(lives):
    """Against every placement on a grid of bytes."""
    instance = instance_of(lives)
    placement = solve(instance)
    assert placement.proved_optimal
    assert placement.footprint_bytes == _least_footprint(lives)


def _least_footprint(lives: list[tuple[int, int, int]]) -> int:
    """Try capacities from below, and for each every offset of every life."""
    lives = [life for life in lives if life[1] > life[0] and life[2]]

    def fits(placed: list[tuple[int, int, int, int]], rest: list[tuple[int, int, int]], capacity: int) -> bool:
        if not rest:
            return True
        start, end, size = rest[0]
        for offset in range(capacity - size + 1):
            if all(
                b_start >= end or b_end <= start or b_offset >= offset + size or b_offset + b_size <= offset
                for b_start, b_end, b_size, b_offset in placed
            ) and fits([*placed, (start, end, size, offset)], rest[1:], capacity):
                return True
        return False

    capacity = 0
    while not fits([], lives, capacity):
        capacity += 1
    return capacity


@pytest.mark.parametrize("seed", range(3))
def test_a_rectangle_that_was_cut_up_is_put_together_again(seed):
    """200 pieces without a gap: the perfect packing is found, and proved."""
    instance, height = guillotine(200, seed)
    placement = solve(instance, seed=seed)
    check(instance, placement.offsets_bytes)
    assert max_load_bytes(instance) == height
    assert placement.footprint_bytes == height
    assert placement.proved_optimal


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64])
def test_any_seed_will_do(seed):
    """Also for ejection search, which these lives come to."""
    generator = np.random.default_rng(0)
    starts = generator.integers(0, 60, 300)
    lives = zip(starts, starts + generator.integers(1, 30, 300), generator.integers(1, 10**9, 300), strict=True)
    instance = instance_of([(int(start), int(end), int(size)) for start, end, size in lives])
    with mock.patch.object(corner, "search", return_value=(corner.LIMIT, np.zeros(300, np.int64), 1)):
        sections = cut(instance.starts, instance.ends, instance.sizes_bytes)
        _, offsets, _ = portfolio.solve(
            sections, instance.sizes_bytes, enough=0, seed=seed, end_s=float("inf"), max_rounds=3
        )
    check(instance, offsets)


def test_the_same_seed_gives_the_same_placement():
    """Nothing depends on the clock while there is time."""
    instance, _ = guillotine(120, 7)
    first, second = (solve(instance, seed=3, time_limit_s=1e9).offsets_bytes for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("path", sample(CHALLENGING, 2), ids=lambda path: path.name[0])
def test_the_hardest_public_instances_are_proved(path):
    """google/minimalloc's, without being told the capacity. Where the data is not there, nothing is tested."""
    instance = read_instance(path)
    placement = solve(instance, time_limit_s=60)
    check(instance, placement.offsets_bytes)
    assert placement.proved_optimal
    assert placement.footprint_bytes <= (capacity_in_name(path) or 0)


def test_large_sizes_and_many_lives():
    """Sizes above 2**40, and a million lives."""
    huge = instance_of([(0, 2, 1 << 41), (1, 3, (1 << 41) + 1), (2, 4, 1 << 41)])
    assert solve(huge).footprint_bytes == (1 << 42) + 1
    generator = np.random.default_rng(0)
    starts = np.sort(generator.integers(0, 1 << 20, 1_000_000))
    lives = list(
        zip(
            starts.tolist(),
            (starts + generator.integers(1, 64, len(starts))).tolist(),
            [512] * len(starts),
            strict=True,
        )
    )
    many = instance_of(lives)
    placement = solve(many, "fast")
    assert placement.footprint_bytes == placement.lower_bound_bytes
    assert placement.offsets_bytes.max() + 512 == placement.footprint_bytes


def test_time_runs_out_with_an_answer():
    """No time at all still gives a right placement."""
    instance, _ = guillotine(400, 1)
    start_s = time.perf_counter()
    placement = solve(instance, time_limit_s=0.0)
    assert placement.time_s <= time.perf_counter() - start_s
    check(instance, placement.offsets_bytes)
    assert placement.lower_bound_bytes <= placement.footprint_bytes


def test_a_placement_ends_with_the_time(monkeypatch):
    """Static orders are given up on the way, and lists for exact search are not begun; what there is, is right."""
    instance, _ = guillotine(400, 1)
    sections = cut(instance.starts, instance.ends, instance.sizes_bytes)
    monkeypatch.setattr(greedy, "_SLICE", 400)  # the clock is read after every life
    given_up, _ = greedy.place_in_order(
        sections, instance.sizes_bytes, np.arange(400), best_fit=True, limit=1 << 40, end_s=0.0
    )
    assert given_up == (1 << 40) + 1
    in_time, offsets = greedy.place_in_order(
        sections, instance.sizes_bytes, np.arange(400), best_fit=True, limit=1 << 40, end_s=float("inf")
    )
    assert in_time == int((offsets + instance.sizes_bytes).max())
    assert find_fault(instance, offsets) is None


@pytest.mark.parametrize("best_fit", [False, True])
@pytest.mark.parametrize("most_moments", [8, 400])
def test_a_greedy_placement_is_what_its_rule_says(best_fit, most_moments):
    """For lives that overlap few others and for ones that overlap many, which are found in different ways."""
    generator = random.Random(most_moments)
    starts = [generator.randrange(400) for _ in range(300)]
    lives = [(start, start + generator.randint(1, most_moments), generator.randint(1, 50)) for start in starts]
    instance = instance_of(lives)
    sections = cut(instance.starts, instance.ends, instance.sizes_bytes)
    assert (greedy.num_steps(sections) < 300 * 300 // 2) == (most_moments == 8)
    order = np.random.default_rng(0).permutation(300)
    _, offsets = greedy.place_in_order(sections, instance.sizes_bytes, order, best_fit=best_fit, limit=1 << 40)
    assert offsets.tolist() == _offsets_by_rule(lives, order.tolist(), best_fit=best_fit)


def _offsets_by_rule(lives: list[tuple[int, int, int]], order: list[int], *, best_fit: bool) -> list[int]:
    offsets = [0] * len(lives)
    for count, life in enumerate(order):
        start, end, size = lives[life]
        near = [other for other in order[:count] if lives[other][0] < end and lives[other][1] > start]
        holes: list[tuple[int, int]] = []  # size, bottom
        top = 0
        for other in sorted(near, key=lambda each: offsets[each]):
            if offsets[other] - top >= size:
                holes.append((offsets[other] - top, top))
            top = max(top, offsets[other] + lives[other][2])
        if not holes:
            offsets[life] = top
        else:
            offsets[life] = min(holes)[1] if best_fit else holes[0][1]
    return offsets


def test_short_lives_are_no_work_for_a_greedy_placement():
    """A hundred thousand that overlap a few others each: SmartPool walks past a hundredth of all pairs, not all."""
    generator = np.random.default_rng(0)
    starts = generator.integers(0, 1 << 20, 100_000)
    ends, sizes = starts + generator.integers(1, 64, 100_000), generator.integers(1, 1 << 24, 100_000)
    instance = make_instance(ids=[str(life) for life in range(100_000)], starts=starts, ends=ends, sizes_bytes=sizes)
    assert greedy.num_steps(cut(starts, ends, sizes)) < 100_000**2 // 200
    assert quick_baselines(instance) == BASELINES
    placement = solve(instance, "smartpool")
    assert find_fault(instance, placement.offsets_bytes) is None


def test_an_unknown_solver_is_told():
    """With those that there are."""
    with pytest.raises(PoolError, match=r"unknown solver 'best': use torchdelta, fast, smartpool"):
        solve(instance_of([(0, 1, 1)]), "best")
