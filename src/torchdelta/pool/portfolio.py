"""Our solver: static orders, then exact search at the lower bound and ejection search in turns, as long as allowed.

1. The lives as they come, forwards and backwards in time; then every static order by first fit and by best fit, each
   given up as soon as it is no better than the best so far. Of these the effort `fast` has the first one only, and none
   for more than 15,000 lives.
2. Rounds of growing effort (Luby et al. 1993), until the footprint is the bound, the search is exhausted, or the tries
   or the time are used up: one restart of `corner.search` with the bound for its capacity, its order drawn at random
   around a static key; and one of `ejection.place_by_ejection` for a little less than the best footprint so far, with
   the large lives alone: the small ones fill what is left between them afterwards.
3. Every eighth round asks exact search for half-way to the best footprint, in case the bound is out of reach.

Asking for the bound outright first is what makes the hard instances easy: see [Note: corners] in corner.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from torchdelta.pool import corner, greedy
from torchdelta.pool.ejection import place_by_ejection
from torchdelta.pool.online import place_like_cnmem
from torchdelta.pool.sections import Sections

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ROUNDS: Final = 2000
_NODES_A_LIFE: Final = 16  # what a descent takes on real steps, waste included
_SCANNED: Final = 1_500_000  # sections that a restart of length 1 may look at beside that
_SCANS_A_S: Final = 5e8  # with a wide margin: what would pass the time limit is not begun
_SCANS_A_PUSH: Final = 4  # for each life that it places: what a push of ejection search costs
_MOST_EFFORT: Final = 8.0
_LEAST_EFFORT: Final = 0.05
_PUSHES: Final = 10_000  # of a try of length 1
_LEAST_PUSHES: Final = 100
_MOST_FOR_EJECTION: Final = 8_000  # lives that are no crumbs
_FIRST_STEPS: Final = 6
_LEAST_STEPS: Final = 3
_MOST_STEPS: Final = 64
_FIRST_CRUMBS: Final = 64
_MOST_FOR_CORNERS: Final = 20_000_000  # sections that lives cover, one by one
_COVERED_A_S: Final = 4e6  # with a margin: what listing those takes
_MOST_AT_A_GLANCE: Final = 15_000
_NOISE: Final = 0.3
_SEEDS: Final = 1 << 32  # that numba's generator knows
_FIRST_S: Final = 3.0  # what the first placement may take, whatever the limit: the rest of it is no good


@dataclass(kw_only=True)
class _State:
    """What is known so far. Mutable."""

    sections: Sections
    sizes: NDArray[np.int64]
    bound: int  # no footprint is below it
    best: int
    offsets: NDArray[np.int64]
    effort: float = 0.25  # of ejection search, a section that exact search looks at; as long as it gains, more
    credit: float = 0.0  # effort that it has not yet spent
    num_tries: int = 0  # of it
    steps: int = _FIRST_STEPS  # ejection search asks for so many-th of the gap between best and bound
    crumbs: int = _FIRST_CRUMBS  # and leaves out what is smaller than so many-th of it

    @property
    def is_done(self) -> bool:
        """Whether nothing better can exist."""
        return self.best <= self.bound

    def take(self, footprint: int, offsets: NDArray[np.int64]) -> None:
        """Keep a placement if it is better."""
        if footprint < self.best:
            self.best, self.offsets = footprint, offsets


def solve(
    sections: Sections,
    sizes: NDArray[np.int64],
    *,
    enough: int,
    seed: int,
    end_s: float,
    max_rounds: int = MAX_ROUNDS,
) -> tuple[int, NDArray[np.int64], int]:
    """Place lives.

    Args:
        sections: Where they are.
        sizes: Their sizes.
        enough: Stop at a footprint that is not above it; the bound, if it is below that.
        seed: Of everything random.
        end_s: Stop at this time of `time.perf_counter`.
        max_rounds: Stop after so many rounds.

    Returns:
        The footprint, the offsets, and a lower bound of every footprint.
    """
    always = (sections.first == 0) & (sections.last == sections.num_sections)
    if always.any() and not always.all():
        return _solve_above(always, sections, sizes, enough=enough, seed=seed, end_s=end_s, max_rounds=max_rounds)
    bound = int(sections.load.max())
    state = _State(sections=sections, sizes=sizes, bound=bound, best=int(sizes.sum()) + 1, offsets=np.zeros_like(sizes))
    _try_online(state, end_s)
    if not state.is_done and (max_rounds or len(sizes) <= _MOST_AT_A_GLANCE):
        _try_orders(state, end_s, greedy.ORDERS if max_rounds else greedy.ORDERS[:1])
    generator = np.random.default_rng(seed)
    problem = None
    num_covered = int((sections.last - sections.first).sum())
    may_list = num_covered <= min(_MOST_FOR_CORNERS, _COVERED_A_S * (end_s - time.perf_counter()))
    if max_rounds and not state.is_done and may_list:
        problem = corner.make_problem(sections, sizes)
    for number in range(1, max_rounds + 1):
        if state.is_done or state.best <= enough or time.perf_counter() >= end_s:
            break
        nodes = _NODES_A_LIFE * len(sizes) + _SCANNED // sections.num_sections * _luby(number)
        scans = nodes * sections.num_sections
        target = _next_target(state, number)
        if problem is not None and scans / _SCANS_A_S < end_s - time.perf_counter():
            status, offsets, num_nodes = corner.search(problem, target, _random_order(state, generator), nodes)
            scans = num_nodes * sections.num_sections
            if status == corner.FOUND:
                state.take(int((offsets + sizes).max()), offsets)
                continue
            if status == corner.EXHAUSTED:
                state.bound = target + 1
        if not state.is_done:
            _try_ejection(state, enough, scans, seed + number, end_s)
    return state.best, state.offsets, min(state.bound, state.best)


def _solve_above(
    always: NDArray[np.bool_],
    sections: Sections,
    sizes: NDArray[np.int64],
    *,
    enough: int,
    seed: int,
    end_s: float,
    max_rounds: int,
) -> tuple[int, NDArray[np.int64], int]:
    """Put the lives that are always there at the bottom, where they are in nobody's way, and solve for the others."""
    bottom = int(sizes[always].sum())
    others = Sections(
        first=sections.first[~always],
        last=sections.last[~always],
        num_sections=sections.num_sections,
        load=sections.load - bottom,
    )
    footprint, above, bound = solve(
        others, sizes[~always], enough=enough - bottom, seed=seed, end_s=end_s, max_rounds=max_rounds
    )
    offsets = np.zeros_like(sizes)
    offsets[always] = np.cumsum(sizes[always]) - sizes[always]
    offsets[~always] = above + bottom
    return footprint + bottom, offsets, bound + bottom


def _try_online(state: _State, end_s: float) -> None:
    """Serve the lives as they come, forwards and backwards in time: next to no work, and close on real steps."""
    first, last = state.sections.first, state.sections.last
    first_end_s = max(end_s, time.perf_counter() + _FIRST_S)
    state.take(*place_like_cnmem(first, last, state.sizes, end_s=first_end_s))
    if not state.is_done and time.perf_counter() < end_s:
        state.take(*place_like_cnmem(-last, -first, state.sizes, end_s=end_s))


def _try_orders(state: _State, end_s: float, names: tuple[str, ...]) -> None:
    for name in names:
        if state.is_done or time.perf_counter() >= end_s:
            break
        order = greedy.static_order(name, state.sections, state.sizes)
        for best_fit in (False, True):
            if state.is_done or time.perf_counter() >= end_s:
                break
            footprint, offsets = greedy.place_in_order(
                state.sections, state.sizes, order, best_fit=best_fit, limit=state.best, end_s=end_s
            )
            state.take(footprint, offsets)


def _try_ejection(state: _State, enough: int, scans: int, seed: int, end_s: float) -> None:
    """Move lives below a capacity that is a little less than the best footprint."""
    sections, sizes = state.sections, state.sizes
    gap = state.best - state.bound
    is_crumb = sizes < gap // state.crumbs
    large = np.flatnonzero(~is_crumb)
    target = max(enough, state.best - max(1, gap // state.steps))
    if not 0 < len(large) <= _MOST_FOR_EJECTION or sizes[large].max() > target:
        return
    of_large = Sections(
        first=sections.first[large], last=sections.last[large], num_sections=sections.num_sections, load=sections.load
    )
    max_pushes = _PUSHES * _luby(state.num_tries + 1)
    state.credit += state.effort * scans
    cost = float(max_pushes) * _SCANS_A_PUSH * len(large)
    left = _SCANS_A_S * (end_s - time.perf_counter())
    if left < cost:  # a shorter try, or none
        max_pushes = int(max_pushes * left / cost)
        cost = left
    if max_pushes < _LEAST_PUSHES or (state.num_tries and state.credit < cost):
        return
    state.credit = max(0.0, state.credit - cost)
    state.num_tries += 1
    start = np.argsort(state.offsets[large], kind="stable")
    _, offsets = greedy.place_in_order(of_large, sizes[large], start, best_fit=False, limit=1 << 62)
    found, offsets = place_by_ejection(
        of_large, sizes[large], offsets, capacity=target, max_pushes=max_pushes, seed=seed % _SEEDS
    )
    before = state.best
    crumbs = np.flatnonzero(is_crumb)
    crumbs = crumbs[np.argsort(-sizes[crumbs], kind="stable")]
    if found:
        order = np.concatenate([large[np.argsort(offsets, kind="stable")], crumbs])
        for best_fit in (False, True):
            state.take(
                *greedy.place_in_order(sections, sizes, order, best_fit=best_fit, limit=state.best - 1, end_s=end_s)
            )
    if state.best < before:
        state.effort = min(_MOST_EFFORT, 2.0 * state.effort)
        state.steps = max(_LEAST_STEPS, 2 * state.steps // 3)
    else:
        state.effort = max(_LEAST_EFFORT, 0.7 * state.effort)
        state.steps = min(_MOST_STEPS, 2 * state.steps)
        if found and len(crumbs):
            state.crumbs *= 2


def _random_order(state: _State, generator: np.random.Generator) -> NDArray[np.int64]:
    width = (state.sections.last - state.sections.first).astype(np.float64)
    size = state.sizes.astype(np.float64)
    key = (size, width, size * width)[generator.integers(3)]
    noise = generator.normal(0.0, _NOISE * generator.integers(4), len(size))
    return np.argsort(-key * np.exp(noise), kind="stable")


def _next_target(state: _State, number: int) -> int:
    """Return the capacity to ask for: the bound, and every eighth time, when a short round comes, half-way from it."""
    return state.bound if number % 8 != 5 else (state.bound + state.best - 1) // 2


def _luby(number: int) -> int:
    """Return the number-th term of 1, 1, 2, 1, 1, 2, 4, ..."""
    while True:
        power = number.bit_length()
        if number == (1 << power) - 1:
            return 1 << (power - 1)
        number -= (1 << (power - 1)) - 1
