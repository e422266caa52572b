"""Exact search: does everything fit below a capacity? Depth first, by corners of the skyline.

[Note: corners]
Any placement can be pushed down until every life rests on the ground or on another, and then be built in an order in
which the *skyline* (per section the top of what stands there) only grows. Look at a valley of the skyline: neighbouring
sections of equal height, higher or finished ones on both sides. Take the section at one end of it, the *corner*. What
comes to stand on the floor there must begin at that section (left end) or end there (right end) and lie inside the
valley: mostly one or two lives. Or nothing does: then the corner's floor rises, for good, to the least height at which
anything that covers it could still rest, and what lies in between is waste. So every node of the search has few
children, and none of them needs an offset of its own.

The *slack* of a section is capacity minus floor minus what is still to come there. Placing a life leaves it as it is,
waste lowers it, and below 0 nothing fits any more. At a capacity equal to the maximal load some sections have no slack
at all: there the search is all but forced, and asking for the lower bound outright is easier than asking for less.

Every node takes the corner with the fewest children, finished sections part the rest into independent ranges, and a
failure in a range goes back to the latest decision that touched this range. Which life is tried first is an order from
outside: restarts with others (Luby et al. 1993) make up for bad luck. All numbers are integers, the order comes from a
seed, and the limit is a number of nodes: the same input gives the same answer.

The scheme is ours; canonical placements and slack are also what google/minimalloc (ASPLOS 2023) is built on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchdelta.pool.sections import Sections

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LIMIT: Final = 0
FOUND: Final = 1
EXHAUSTED: Final = 2

_PLACED: Final = 1
_WASTED: Final = 2
_FAR: Final = np.int64(1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CornerProblem:
    """Lives in sections, with the lists that the search walks along.

    Attributes:
        first: First section of each life.
        last: One more than its last one.
        sizes: Its size.
        num_sections: How many sections there are.
        covering: Lives that cover a section, all sections one after the other.
        covering_start: Where each section's part of `covering` begins, and one more.
    """

    first: Ints
    last: Ints
    sizes: Ints
    num_sections: int
    covering: Ints
    covering_start: Ints


def make_problem(sections: Sections, sizes: Ints) -> CornerProblem:
    """Put the lists together."""
    lengths = sections.last - sections.first
    lives = np.repeat(np.arange(len(sizes)), lengths)
    steps = np.arange(len(lives)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    covered = np.repeat(sections.first, lengths) + steps
    order = np.argsort(covered, kind="stable")
    return CornerProblem(
        first=sections.first,
        last=sections.last,
        sizes=sizes,
        num_sections=sections.num_sections,
        covering=lives[order],
        covering_start=np.searchsorted(covered[order], np.arange(sections.num_sections + 1)),
    )


def search(problem: CornerProblem, capacity: int, order: Ints, max_nodes: int) -> tuple[int, Ints, int]:
    """Look for a placement below a capacity.

    Of the lives that fit at a corner, earlier ones in the order are tried first.

    Returns:
        `FOUND`, `EXHAUSTED` (there is none) or `LIMIT`; the offsets, if found; the number of nodes.
    """
    num_lives = len(problem.sizes)
    rank = np.empty(num_lives, np.int64)
    rank[order] = np.arange(num_lives)
    by_first = np.lexsort((rank, problem.first))
    by_last = np.lexsort((rank, problem.last))
    bounds = np.arange(problem.num_sections + 2)
    return _search(
        problem.first,
        problem.last,
        problem.sizes,
        problem.num_sections,
        capacity,
        by_first,
        np.searchsorted(problem.first[by_first], bounds),
        by_last,
        np.searchsorted(problem.last[by_last], bounds),
        problem.covering,
        problem.covering_start,
        _earlier_twins(problem, order),
        max_nodes,
    )


def _earlier_twins(problem: CornerProblem, order: Ints) -> Ints:
    """Return for each life the equal one just before it in the order, or -1: of equal lives one order is enough."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    sorted_lives = np.lexsort((position, problem.sizes, problem.last, problem.first))
    before, after = sorted_lives[:-1], sorted_lives[1:]
    is_equal = (
        (problem.first[before] == problem.first[after])
        & (problem.last[before] == problem.last[after])
        & (problem.sizes[before] == problem.sizes[after])
    )
    twins = np.full(len(order), -1, np.int64)
    twins[after[is_equal]] = before[is_equal]
    return twins


@njit(cache=True)
def _num_at_corner(
    lives: Ints, begin: int, end: int, placed: Bools, twins: Ints, first: Ints, last: Ints, low: int, high: int
) -> int:
    """Count the lives that can stand at a corner of the valley [low, high)."""
    num = 0
    for position in range(begin, end):
        life = lives[position]
        if placed[life] or first[life] < low or last[life] > high:
            continue
        if twins[life] >= 0 and not placed[twins[life]]:
            continue
        num += 1
    return num


@njit(cache=True)
def _least_rise(
    corner: int,
    is_right: bool,
    floor: Ints,
    placed: Bools,
    first: Ints,
    last: Ints,
    sizes: Ints,
    covering: Ints,
    covering_start: Ints,
    by_first: Ints,
    by_first_start: Ints,
    by_last: Ints,
    by_last_start: Ints,
    highest: Ints,
) -> Any:
    """Return the least height above its floor at which anything that covers the corner can still rest.

    `highest` is room to work in: the highest floor between each section and the corner.
    """
    height = floor[corner]
    begin, end = covering_start[corner], covering_start[corner + 1]
    low, high = corner, corner + 1
    for position in range(begin, end):
        life = covering[position]
        if not placed[life]:
            low, high = min(low, first[life]), max(high, last[life])
    highest[corner] = height
    for section in range(corner - 1, low - 1, -1):
        highest[section] = max(highest[section + 1], floor[section])
    for section in range(corner + 1, high):
        highest[section] = max(highest[section - 1], floor[section])
    least = _FAR
    inner_low, inner_high = corner, corner + 1
    for position in range(begin, end):
        life = covering[position]
        if placed[life]:
            continue
        ground = max(highest[first[life]], highest[last[life] - 1])
        if ground > height:
            least = min(least, ground)
        else:  # it lies in the valley, and may rest on another there that misses the corner
            inner_low, inner_high = min(inner_low, first[life]), max(inner_high, last[life])
    if is_right:
        others, begin, end = by_last, by_last_start[inner_low + 1], by_last_start[corner + 1]
    else:
        others, begin, end = by_first, by_first_start[corner + 1], by_first_start[inner_high]
    for position in range(begin, end):
        other = others[position]
        if not placed[other]:
            least = min(least, height + sizes[other])
    return least


@njit(cache=True)
def _search(
    first: Ints,
    last: Ints,
    sizes: Ints,
    num_sections: int,
    capacity: int,
    by_first: Ints,
    by_first_start: Ints,
    by_last: Ints,
    by_last_start: Ints,
    covering: Ints,
    covering_start: Ints,
    twins: Ints,
    max_nodes: int,
) -> tuple[int, Ints, int]:
    num_lives = first.size
    offsets = np.zeros(num_lives, np.int64)
    floor = np.zeros(num_sections, np.int64)
    to_come = np.zeros(num_sections, np.int64)  # bytes of the lives that are not placed
    num_to_come = np.zeros(num_sections, np.int64)
    placed = np.zeros(num_lives, np.bool_)
    highest = np.zeros(num_sections, np.int64)
    for life in range(num_lives):
        for section in range(first[life], last[life]):
            to_come[section] += sizes[life]
            num_to_come[section] += 1
    if num_sections and to_come.max() > capacity:
        return EXHAUSTED, offsets, 0
    max_depth = 2 * num_lives + 64 * num_sections + 64
    move = np.zeros(max_depth, np.int8)
    move_life = np.zeros(max_depth, np.int64)
    corner_of = np.zeros(max_depth, np.int64)
    is_right = np.zeros(max_depth, np.bool_)
    low_of, high_of = np.zeros(max_depth, np.int64), np.zeros(max_depth, np.int64)  # the valley
    next_of = np.zeros(max_depth, np.int64)  # position of the next life to try
    height_of = np.zeros(max_depth, np.int64)
    range_low, range_high = np.zeros(max_depth, np.int64), np.zeros(max_depth, np.int64)  # the independent range
    failed_low, failed_high = np.int64(0), np.int64(num_sections)
    depth = num_placed = num_nodes = 0
    descends = True
    while True:
        if descends:
            if num_placed == num_lives:
                return FOUND, offsets, num_nodes
            num_nodes += 1
            if num_nodes > max_nodes or depth == max_depth:
                return LIMIT, offsets, num_nodes
            least, least_height, least_slack = 1 << 30, _FAR, _FAR
            corner = low = high = 0
            right = False
            section = 0
            left_height = _FAR
            while section < num_sections and least:
                if num_to_come[section] == 0:
                    left_height = _FAR
                    section += 1
                    continue
                height = floor[section]
                end = section + 1
                while end < num_sections and num_to_come[end] and floor[end] == height:
                    end += 1
                right_height = floor[end] if end < num_sections and num_to_come[end] else _FAR
                if left_height > height and right_height > height:
                    for side in range(2):
                        here = section if side == 0 else end - 1
                        if side == 0:
                            lives, at = by_first, by_first_start[section : section + 2]
                        else:
                            lives, at = by_last, by_last_start[end : end + 2]
                        num = _num_at_corner(lives, at[0], at[1], placed, twins, first, last, section, end)
                        slack = capacity - height - to_come[here]
                        num += slack > 0
                        if num < least or (
                            num == least and (height < least_height or (height == least_height and slack < least_slack))
                        ):
                            least, least_height, least_slack = num, height, slack
                            corner, right, low, high = here, side == 1, section, end
                left_height = height
                section = end
            failed_low, failed_high = corner, corner + 1
            while failed_low > 0 and num_to_come[failed_low - 1]:
                failed_low -= 1
            while failed_high < num_sections and num_to_come[failed_high]:
                failed_high += 1
            descends = False
            if least:
                move[depth] = 0
                corner_of[depth], is_right[depth], height_of[depth] = corner, right, least_height
                low_of[depth], high_of[depth] = low, high
                range_low[depth], range_high[depth] = failed_low, failed_high
                next_of[depth] = by_last_start[high] if right else by_first_start[low]
                depth += 1
            elif depth == 0:
                return EXHAUSTED, offsets, num_nodes
        top = depth - 1
        if move[top] == _PLACED:
            life = move_life[top]
            placed[life] = False
            num_placed -= 1
            for section in range(first[life], last[life]):
                floor[section] = height_of[top]
                to_come[section] += sizes[life]
                num_to_come[section] += 1
            is_to_blame = first[life] < failed_high and last[life] > failed_low
            has_more = is_to_blame
        elif move[top] == _WASTED:
            floor[corner_of[top]] = height_of[top]
            is_to_blame = failed_low <= corner_of[top] < failed_high
            has_more = False
            if is_to_blame:
                failed_low, failed_high = range_low[top], range_high[top]
        else:
            has_more = True
        if has_more:
            low, high, right = low_of[top], high_of[top], is_right[top]
            lives = by_last if right else by_first
            end = by_last_start[high + 1] if right else by_first_start[low + 1]
            life = -1
            position = next_of[top]
            while position < end:
                candidate = lives[position]
                position += 1
                if placed[candidate] or first[candidate] < low or last[candidate] > high:
                    continue
                if twins[candidate] >= 0 and not placed[twins[candidate]]:
                    continue
                life = candidate
                break
            next_of[top] = position
            height = height_of[top]
            if life >= 0:
                placed[life] = True
                num_placed += 1
                offsets[life] = height
                for section in range(first[life], last[life]):
                    floor[section] = height + sizes[life]
                    to_come[section] -= sizes[life]
                    num_to_come[section] -= 1
                move[top], move_life[top] = _PLACED, life
                descends = True
                continue
            corner = corner_of[top]
            slack = capacity - height - to_come[corner]
            if slack > 0:
                least_height = _least_rise(
                    corner,
                    is_right[top],
                    floor,
                    placed,
                    first,
                    last,
                    sizes,
                    covering,
                    covering_start,
                    by_first,
                    by_first_start,
                    by_last,
                    by_last_start,
                    highest,
                )
                if least_height - height <= slack:
                    floor[corner] = least_height
                    move[top] = _WASTED
                    descends = True
                    continue
            failed_low, failed_high = range_low[top], range_high[top]
        move[top] = 0
        depth -= 1
        if depth == 0:
            return EXHAUSTED, offsets, num_nodes
