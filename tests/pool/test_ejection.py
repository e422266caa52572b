"""Ejection search: what it says is found is a placement below the capacity."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.instances import guillotine
from torchdelta.pool import greedy
from torchdelta.pool.ejection import place_by_ejection
from torchdelta.pool.sections import cut


def _overlaps(first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    in_time = (first[:, None] < last[None, :]) & (last[:, None] > first[None, :])
    in_space = (low[:, None] < high[None, :]) & (high[:, None] > low[None, :])
    np.fill_diagonal(in_time, val=False)
    return bool((in_time & in_space).any())


@settings(deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=14),
    spare=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_what_is_found_is_a_placement(lives: list[tuple[int, int, int]], spare: int, seed: int) -> None:
    """From one above the other: no overlap, no top above the capacity, and the same again from the same seed."""
    starts, widths, sizes = (np.array(column, np.int64) for column in zip(*lives, strict=True))
    sections = cut(starts, starts + widths, sizes)
    capacity = int(sections.load.max()) + spare
    tower = np.cumsum(sizes) - sizes
    found, offsets = place_by_ejection(sections, sizes, tower, capacity=capacity, max_pushes=300, seed=seed)
    _, again = place_by_ejection(sections, sizes, tower, capacity=capacity, max_pushes=300, seed=seed)
    assert offsets.tolist() == again.tolist()
    assert tower.tolist() == (np.cumsum(sizes) - sizes).tolist()
    if found:
        assert offsets.min() >= 0
        assert int((offsets + sizes).max()) <= capacity
        assert not _overlaps(starts, starts + widths, offsets, offsets + sizes)


def test_a_tower_comes_down() -> None:
    """Lives that stand one above the other, far above a roomy capacity, all find a place below it."""
    starts, sizes = np.arange(30) % 7, np.arange(1, 31)
    sections = cut(starts, starts + 5, sizes)
    found, _ = place_by_ejection(
        sections, sizes, np.zeros(30, np.int64), capacity=int(sizes.sum()), max_pushes=10_000, seed=0
    )
    assert found


def test_it_gains_on_a_greedy_placement() -> None:
    """A cut rectangle that first fit by size leaves with holes is packed tighter."""
    instance, height = guillotine(200, 3)
    sizes = instance.sizes_bytes
    sections = cut(instance.starts, instance.ends, sizes)
    order = greedy.static_order("size", sections, sizes)
    footprint, offsets = greedy.place_in_order(sections, sizes, order, best_fit=False, limit=1 << 62)
    target = (height + footprint) // 2
    found, placed = place_by_ejection(sections, sizes, offsets, capacity=target, max_pushes=50_000, seed=0)
    assert height < target < footprint
    assert found
    assert not _overlaps(instance.starts, instance.ends, placed, placed + sizes)


def test_who_cannot_fit_stays_without_a_home() -> None:
    """Below the load nothing is found, and the search ends."""
    starts, sizes = np.zeros(4, np.int64), np.full(4, 3)
    sections = cut(starts, starts + 2, sizes)
    found, _ = place_by_ejection(sections, sizes, np.arange(4) * 3, capacity=11, max_pushes=500, seed=0)
    assert not found
