"""Placing lives one after the other, in a given order: first fit and best fit.

Each life goes into a hole between those placed before it that overlap it in time: the lowest one that is large enough
(first fit), or the smallest (best fit, the lowest of equals); above all of them where there is none. O(n^2) in the
worst case, but the placed lives are walked in order of their offsets and the walk ends at the first hole (first fit),
so large instances of short lives are far from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchdelta.pool.sections import Sections

Ints = NDArray[np.int64]

ORDERS: Final = ("size", "area", "life", "start", "start-size", "wat", "taw", "twa", "ts")
"""The static orders, all of decreasing keys but `start`: see `static_order`."""


def static_order(name: str, sections: Sections, sizes: Ints) -> Ints:
    """Return the lives in an order.

    Args:
        name: `size` (then width, then earliest start), `area`, `life` (width), `start` (ascending, then width),
            `start-size` (ascending, then size), `wat`, `taw`, `twa` (width, area, and t, the greatest load of any
            section that the life spans, in that order; after google/minimalloc), `ts` (t, then size).
        sections: Where the lives are.
        sizes: Their sizes.
    """
    first, width = sections.first, sections.last - sections.first
    area = width.astype(np.float64) * sizes
    if name in ("wat", "taw", "twa", "ts"):
        t = _greatest_load(first, sections.last, sections.load)
        keys = {"wat": (width, area, t), "taw": (t, area, width), "twa": (t, width, area), "ts": (t, sizes)}[name]
    else:
        keys = {
            "size": (sizes, width, -first),
            "area": (area, sizes),
            "life": (width, sizes),
            "start": (-first, width),
            "start-size": (-first, sizes),
        }[name]
    return np.lexsort(tuple(-key for key in reversed(keys)))


@njit(cache=True)
def _greatest_load(first: Ints, last: Ints, load: Ints) -> Ints:
    # Sparse table: the greatest load of any range from two overlapping ranges of a power of two.
    num_levels = 1
    while (1 << num_levels) <= load.size:
        num_levels += 1
    table = np.empty((num_levels, load.size), np.int64)
    table[0] = load
    for level in range(1, num_levels):
        half = 1 << (level - 1)
        for section in range(load.size - 2 * half + 1):
            table[level, section] = max(table[level - 1, section], table[level - 1, section + half])
    out = np.empty(first.size, np.int64)
    for life in range(first.size):
        length = last[life] - first[life]
        level = 0
        while (2 << level) <= length:
            level += 1
        out[life] = max(table[level, first[life]], table[level, last[life] - (1 << level)])
    return out


def place_in_order(sections: Sections, sizes: Ints, order: Ints, *, best_fit: bool, limit: int) -> tuple[int, Ints]:
    """Place lives in an order.

    Each goes into the lowest hole, with `best_fit` into the smallest. Gives up as soon as a top is above the limit.

    Returns:
        The footprint, or `limit + 1` where it was given up; the offsets.
    """
    footprint, offsets = _place(sections.first, sections.last, sizes, order, best_fit, limit)
    return int(footprint), offsets


@njit(cache=True)
def _place(first: Ints, last: Ints, sizes: Ints, order: Ints, best_fit: bool, limit: int) -> tuple[Any, Ints]:
    num = order.size
    offsets = np.zeros(num, np.int64)
    # The placed lives in order of their offsets, as parallel arrays: the walk, where the time goes, reads memory in one
    # direction, and making room for one more moves whole blocks of it.
    begins, ends = np.empty(num, np.int32), np.empty(num, np.int32)
    lows, highs = np.empty(num, np.int64), np.empty(num, np.int64)
    footprint = np.int64(0)
    for count in range(num):
        life = order[count]
        begin, end, size = first[life], last[life], sizes[life]
        top = np.int64(0)
        chosen = np.int64(-1)
        smallest = np.int64(1) << 62
        for position in range(count):
            if begins[position] >= end or ends[position] <= begin:
                continue
            hole = lows[position] - top
            if hole >= size and hole < smallest:
                chosen, smallest = top, hole
                if not best_fit:
                    break
            top = max(top, highs[position])
        if chosen < 0:
            chosen = top
        if chosen + size > limit:
            return limit + 1, offsets
        offsets[life] = chosen
        footprint = max(footprint, chosen + size)
        at = np.searchsorted(lows[:count], chosen, side="right")
        for position in range(count, at, -1):
            begins[position], ends[position] = begins[position - 1], ends[position - 1]
            lows[position], highs[position] = lows[position - 1], highs[position - 1]
        begins[at], ends[at], lows[at], highs[at] = begin, end, chosen, chosen + size
    return footprint, offsets
