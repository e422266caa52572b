"""Guided ejection search: lives that stand above a capacity are put below it, and push others out.

A life without a place takes the one where the lives in its way weigh the least; these lose theirs in turn. A life's
weight grows with every time that it found no free place, so that the search learns which lives are hard to place and
stops pushing them out (Nagata and Braysy 2009, for vehicle routing; here for address spaces). After each push some
lives move to another free place, at random, which keeps the search from going round in circles.

Where exact search asks which life may stand next, this one repairs a whole placement, and slack makes it easier, not
harder. So it serves what exact search cannot: many sizes that share no divisor, loads that are nearly flat - steps
under a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchdelta.pool.sections import Sections

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_RELOCATIONS = 1  # lives that move to another free place after a push, or stay
_FAR = np.int64(1 << 62)


class _Placed(NamedTuple):
    """The lives that have a place, in order of their bottoms and in order of their tops, and room to work in.

    Attributes:
        num: One entry: how many they are.
        by_low: They, in order of their bottoms.
        low: Those bottoms.
        by_high: They, in order of their tops.
        high: Those tops.
        near_low: Of the lives in the way of one that is to be placed: bottoms, in order.
        near_low_weight: What each of them weighs.
        near_high: Their tops, in order.
        near_high_weight: What each of them weighs.
    """

    num: Ints
    by_low: Ints
    low: Ints
    by_high: Ints
    high: Ints
    near_low: Ints
    near_low_weight: Ints
    near_high: Ints
    near_high_weight: Ints


def place_by_ejection(
    sections: Sections, sizes: Ints, offsets: Ints, *, capacity: int, max_pushes: int, seed: int
) -> tuple[bool, Ints]:
    """Look for a placement below a capacity, starting from one that passes it.

    Args:
        sections: Where the lives are.
        sizes: Their sizes, none above the capacity.
        offsets: A placement of them, in which none that is below the capacity overlaps another.
        capacity: What no top may pass.
        max_pushes: Give up after so many lives were placed.
        seed: Of the choice among equal places and of who moves.

    Returns:
        Whether it was found, and the offsets; if it was not, they overlap.
    """
    offsets = offsets.copy()
    found = _eject(sections.first, sections.last, sizes, offsets, capacity, max_pushes, seed)
    return bool(found), offsets


@njit(cache=True)
def _insert(lives: Ints, keys: Ints, num: int, life: int, key: int) -> None:
    at = np.searchsorted(keys[:num], key)
    for position in range(num, at, -1):
        lives[position], keys[position] = lives[position - 1], keys[position - 1]
    lives[at], keys[at] = life, key


@njit(cache=True)
def _remove(lives: Ints, keys: Ints, num: int, life: int, key: int) -> None:
    at = np.searchsorted(keys[:num], key)
    while lives[at] != life:
        at += 1
    for position in range(at, num - 1):
        lives[position], keys[position] = lives[position + 1], keys[position + 1]


@njit(cache=True)
def _move_in(placed: _Placed, life: int, low: Any, size: Any) -> None:
    _insert(placed.by_low, placed.low, placed.num[0], life, low)
    _insert(placed.by_high, placed.high, placed.num[0], life, low + size)
    placed.num[0] += 1


@njit(cache=True)
def _move_out(placed: _Placed, life: int, low: Any, size: Any) -> None:
    _remove(placed.by_low, placed.low, placed.num[0], life, low)
    _remove(placed.by_high, placed.high, placed.num[0], life, low + size)
    placed.num[0] -= 1


@njit(cache=True)
def _cheapest(placed: _Placed, life: int, first: Ints, last: Ints, size: Any, weight: Ints, ceiling: Any) -> Any:
    """Return an offset up to a ceiling, of equal ones any, and the weight of what stands in the way there.

    Offsets that matter: the ground, the ceiling, on top of another and right below another. They come in ascending
    order; what is in the way enters with its bottom and leaves with its top.
    """
    begin, end, num = first[life], last[life], 0
    for position in range(placed.num[0]):
        other = placed.by_low[position]
        if first[other] < end and last[other] > begin:
            placed.near_low[num], placed.near_low_weight[num] = placed.low[position], weight[other]
            num += 1
    num = 0
    for position in range(placed.num[0]):
        other = placed.by_high[position]
        if first[other] < end and last[other] > begin:
            placed.near_high[num], placed.near_high_weight[num] = placed.high[position], weight[other]
            num += 1
    chosen, least, num_equal = np.int64(0), _FAR, 0
    in_the_way = np.int64(0)
    entering = leaving = below = above = 0
    place = np.int64(0)
    while True:
        while entering < num and placed.near_low[entering] < place + size:
            in_the_way += placed.near_low_weight[entering]
            entering += 1
        while leaving < num and placed.near_high[leaving] <= place:
            in_the_way -= placed.near_high_weight[leaving]
            leaving += 1
        if in_the_way < least:
            chosen, least, num_equal = place, in_the_way, 1
        elif in_the_way == least:
            num_equal += 1
            if np.random.randint(num_equal) == 0:  # noqa: NPY002 - numba's own generator, seeded by the caller
                chosen = place
        if place == ceiling:
            return chosen, least
        while below < num and placed.near_low[below] - size <= place:
            below += 1
        while above < num and placed.near_high[above] <= place:
            above += 1
        place = ceiling
        if below < num:
            place = min(place, placed.near_low[below] - size)
        if above < num:
            place = min(place, placed.near_high[above])


@njit(cache=True)
def _eject(first: Ints, last: Ints, sizes: Ints, offsets: Ints, capacity: int, max_pushes: int, seed: int) -> bool:
    np.random.seed(seed)  # noqa: NPY002 - numba's own generator
    num_lives = sizes.size
    weight = np.ones(num_lives, np.int64)
    has_place = np.zeros(num_lives, np.bool_)
    waiting, num_waiting = np.empty(num_lives, np.int64), 0
    room = np.empty((8, num_lives), np.int64)
    placed = _Placed(np.zeros(1, np.int64), room[0], room[1], room[2], room[3], room[4], room[5], room[6], room[7])
    for life in range(num_lives):
        if offsets[life] + sizes[life] > capacity:
            waiting[num_waiting] = life
            num_waiting += 1
        else:
            has_place[life] = True
            _move_in(placed, life, offsets[life], sizes[life])
    for _ in range(max_pushes):
        if not num_waiting:
            break
        num_waiting -= 1
        life = waiting[num_waiting]
        place, in_the_way = _cheapest(placed, life, first, last, sizes[life], weight, capacity - sizes[life])
        if in_the_way:
            weight[life] += 1
            position = 0
            while position < placed.num[0] and placed.low[position] < place + sizes[life]:
                other = placed.by_low[position]
                if first[other] < last[life] and last[other] > first[life] and offsets[other] + sizes[other] > place:
                    _move_out(placed, other, offsets[other], sizes[other])
                    has_place[other] = False
                    waiting[num_waiting] = other
                    num_waiting += 1
                else:
                    position += 1
        offsets[life] = place
        has_place[life] = True
        _move_in(placed, life, place, sizes[life])
        if not in_the_way:
            continue
        for _ in range(_RELOCATIONS):
            mover = np.random.randint(num_lives)  # noqa: NPY002 - numba's own generator
            if has_place[mover]:
                _move_out(placed, mover, offsets[mover], sizes[mover])
                size = sizes[mover]
                offsets[mover], _ = _cheapest(placed, mover, first, last, size, weight, capacity - size)  # a free place
                _move_in(placed, mover, offsets[mover], size)
    return num_waiting == 0
