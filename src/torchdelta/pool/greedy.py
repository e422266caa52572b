"""Placing lives one after the other, in a given order: first fit and best fit.

Each life goes into a hole between those placed before it that overlap it in time: the lowest one that is large enough
(first fit), or the smallest (best fit, the lowest of equals); above all of them where there is none.

Where a life overlaps many others, all placed lives are walked in order of their offsets: O(n^2). Where it overlaps few
(large instances of short lives), those are looked up and sorted instead. The placement is the same.

[Note: bins of lives]
Level k cuts the sections into bins of 2^k. A life is in one bin: the smallest that holds all of it. What overlaps a
life is in a bin that meets it, on some level. Of the bins of a level only the first and the last can hold others, too.
Lives that share a bin above level 0 overlap each other, so these others are few where few are alive at once.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchdelta.pool.sections import Sections

Ints = NDArray[np.int64]

ORDERS: Final = ("size", "area", "life", "start", "start-size", "wat", "taw", "twa", "ts")
"""The static orders, all of decreasing keys but `start`: see `static_order`."""

_FINDING: Final = 20  # what it takes to look up and sort a life, measured in lives that are walked past
_SLICE: Final = 20_000_000  # lives that are walked past between two looks at the clock: some hundredths of a second


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


def place_in_order(
    sections: Sections, sizes: Ints, order: Ints, *, best_fit: bool, limit: int, end_s: float = math.inf
) -> tuple[int, Ints]:
    """Place lives in an order.

    Each goes into the lowest hole, with `best_fit` into the smallest. Gives up as soon as a top is above the limit, or
    at the time `end_s` of `time.perf_counter`.

    Returns:
        The footprint, or `limit + 1` where it was given up; the offsets.
    """
    first, last, num = sections.first, sections.last, len(order)
    offsets = np.zeros(num, np.int64)
    placed = _Row(np.empty(num, np.int32), np.empty(num, np.int32), np.empty(num, np.int64), np.empty(num, np.int64))
    bins = _make_bins(sections) if num_steps(sections) < _steps_of_walks(num) else None
    size = max(1, _SLICE // max(num, 1))
    footprint = 0
    for begin in range(0, num, size):
        if begin and time.perf_counter() >= end_s:
            return limit + 1, offsets
        part = order[begin : begin + size]
        if bins is None:
            top = _place_among_all(first, last, sizes, part, begin, offsets, placed, best_fit, limit)
        else:
            top = _place_among_near(first, last, sizes, part, offsets, bins, placed, best_fit, limit)
        footprint = max(footprint, int(top))
        if footprint > limit:
            break
    return footprint, offsets


def num_steps(sections: Sections) -> int:
    """Return how many lives `place_in_order` walks past at most: a measure of its time."""
    num, num_sections = len(sections.first), sections.num_sections
    num_begun = np.cumsum(np.bincount(sections.first, minlength=num_sections))
    num_ended = np.cumsum(np.bincount(sections.last, minlength=num_sections + 1))
    num_overlaps = int((num_begun[sections.last - 1] - num_ended[sections.first]).sum())
    return min(_FINDING * num_overlaps // 2, _steps_of_walks(num))


def _steps_of_walks(num_lives: int) -> int:
    return num_lives * num_lives // 2


class _Row(NamedTuple):
    """Lives that are placed, in order of their bottoms.

    Attributes:
        begins: First section of each.
        ends: One more than its last one.
        lows: Its bottom.
        highs: Its top.
    """

    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    lows: Ints
    highs: Ints


class _Bins(NamedTuple):
    """The placed lives by bin: see [Note: bins of lives].

    Attributes:
        level_start: The first bin of each level.
        bin_of: The bin of each life, placed or not.
        bin_start: Where each bin's part of `lives` begins.
        num_in: How many lives of each bin are placed.
        lives: These, all bins one after the other.
    """

    level_start: Ints
    bin_of: Ints
    bin_start: Ints
    num_in: Ints
    lives: Ints


def _make_bins(sections: Sections) -> _Bins:
    levels = np.arange(max(sections.num_sections - 1, 0).bit_length() + 1)
    level_sizes = ((sections.num_sections - 1) >> levels) + 1
    level_start = np.cumsum(level_sizes) - level_sizes
    _, level_of = np.frexp((sections.first ^ (sections.last - 1)).astype(np.float64))  # the bits in which they differ
    bin_of = level_start[level_of] + (sections.first >> level_of)
    counts = np.bincount(bin_of, minlength=int(level_sizes.sum()))
    return _Bins(level_start, bin_of, np.cumsum(counts) - counts, np.zeros_like(counts), np.empty_like(bin_of))


@njit(cache=True)
def _find_place(row: _Row, num: int, begin: Any, end: Any, size: Any, best_fit: bool) -> Any:
    """Return the offset for a life among the first so many of a row."""
    top, chosen, smallest = np.int64(0), np.int64(-1), np.int64(1) << 62
    for position in range(num):
        if row.begins[position] >= end or row.ends[position] <= begin:
            continue
        hole = row.lows[position] - top
        if hole >= size and hole < smallest:
            chosen, smallest = top, hole
            if not best_fit:
                break
        top = max(top, row.highs[position])
    return top if chosen < 0 else chosen


@njit(cache=True)
def _place_among_all(
    first: Ints,
    last: Ints,
    sizes: Ints,
    order: Ints,
    num_placed: int,
    offsets: Ints,
    row: _Row,
    best_fit: bool,
    limit: int,
) -> Any:
    """Place lives after so many others, and return the highest top; stop at one that is above the limit."""
    begins, ends, lows, highs = row
    footprint = np.int64(0)
    for index in range(order.size):
        life, count = order[index], num_placed + index
        begin, end, size = first[life], last[life], sizes[life]
        chosen = _find_place(row, count, begin, end, size, best_fit)
        if chosen + size > limit:
            return limit + 1
        offsets[life] = chosen
        footprint = max(footprint, chosen + size)
        at = np.searchsorted(lows[:count], chosen, side="right")
        for position in range(count, at, -1):
            begins[position], ends[position] = begins[position - 1], ends[position - 1]
            lows[position], highs[position] = lows[position - 1], highs[position - 1]
        begins[at], ends[at], lows[at], highs[at] = begin, end, chosen, chosen + size
    return footprint


@njit(cache=True)
def _place_among_near(
    first: Ints,
    last: Ints,
    sizes: Ints,
    order: Ints,
    offsets: Ints,
    bins: _Bins,
    row: _Row,
    best_fit: bool,
    limit: int,
) -> Any:
    """Do the same with bins; the row is only room to work in."""
    near, bottoms = np.empty(offsets.size, np.int64), np.empty(offsets.size, np.int64)
    footprint = np.int64(0)
    for life in order:
        begin, end, size = first[life], last[life], sizes[life]
        num = 0
        for level in range(bins.level_start.size):
            start = bins.level_start[level]
            for bin_ in range(start + (begin >> level), start + ((end - 1) >> level) + 1):
                for position in range(bins.bin_start[bin_], bins.bin_start[bin_] + bins.num_in[bin_]):
                    other = bins.lives[position]
                    if first[other] < end and last[other] > begin:
                        near[num], bottoms[num] = other, offsets[other]
                        num += 1
        sorted_ = np.argsort(bottoms[:num])
        for position in range(num):
            other = near[sorted_[position]]
            row.begins[position], row.ends[position] = first[other], last[other]
            row.lows[position], row.highs[position] = offsets[other], offsets[other] + sizes[other]
        chosen = _find_place(row, num, begin, end, size, best_fit)
        if chosen + size > limit:
            return limit + 1
        offsets[life] = chosen
        footprint = max(footprint, chosen + size)
        bin_ = bins.bin_of[life]
        bins.lives[bins.bin_start[bin_] + bins.num_in[bin_]] = life
        bins.num_in[bin_] += 1
    return footprint
