"""Instances to place: random ones, and ones whose perfect packing is known because a rectangle was cut up."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from torchdelta.pool.model import Instance, make_instance

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def instance_of(lives: list[tuple[int, int, int]], *, alignment_bytes: int = 1) -> Instance:
    """Make an instance from (start, end, size)."""
    return make_instance(
        ids=[f"b{number}" for number in range(len(lives))],
        starts=[start for start, _, _ in lives],
        ends=[end for _, end, _ in lives],
        sizes_bytes=[size for _, _, size in lives],
        alignment_bytes=alignment_bytes,
    )


def random_lives(
    most: int, *, most_bytes: int = 40, least_bytes: int = 0
) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Draw lives, also empty ones and ones without a size."""
    life = st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(least_bytes, most_bytes))
    return st.lists(life.map(lambda each: (each[0], each[0] + each[1], each[2])), min_size=0, max_size=most)


def guillotine(num_lives: int, seed: int, *, height: int = 1 << 20, width: int = 1 << 20) -> tuple[Instance, int]:
    """Cut a rectangle of time and memory into lives, straight through and again and again.

    Returns:
        The lives in random order, and the height: the lives fill the rectangle, so that is the load at every moment,
        and a placement with just this footprint exists.
    """
    generator = random.Random(seed)
    # The largest piece is cut next, so that no piece is hopelessly large or small.
    pieces = [(-float(height) * width, 0, 0, width, 0, height)]
    number = 1
    while len(pieces) < num_lives:
        _, _, left, right, bottom, top = heapq.heappop(pieces)
        across = right - left > 1 and (top - bottom <= 1 or generator.random() < 0.5)
        share = generator.uniform(0.15, 0.85)
        if across:
            cut = min(max(left + 1, left + int((right - left) * share)), right - 1)
            halves = ((left, cut, bottom, top), (cut, right, bottom, top))
        else:
            cut = min(max(bottom + 1, bottom + int((top - bottom) * share)), top - 1)
            halves = ((left, right, bottom, cut), (left, right, cut, top))
        for half in halves:
            area = float(half[1] - half[0]) * (half[3] - half[2])
            heapq.heappush(pieces, (-area, number, *half))
            number += 1
    lives = [(left, right, top - bottom) for _, _, left, right, bottom, top in pieces]
    generator.shuffle(lives)
    return instance_of(lives), height


def is_free_of_overlap(instance: Instance, offsets: NDArray[np.int64]) -> bool:
    """Compare every pair: slow, and plain to see that it is right."""
    sizes = instance.sizes_bytes
    for a in range(len(instance)):
        for b in range(a):
            in_time = instance.starts[a] < instance.ends[b] and instance.starts[b] < instance.ends[a]
            in_space = offsets[a] < offsets[b] + sizes[b] and offsets[b] < offsets[a] + sizes[a]
            alive = min(instance.ends[a] - instance.starts[a], instance.ends[b] - instance.starts[b]) > 0
            if in_time and in_space and alive and sizes[a] and sizes[b]:
                return False
    return True
