"""Our solver: static orders, then in turns exact search at the lower bound and local search, for as long as is allowed.

1. The lives as they come, forwards and backwards in time; then every static order by first fit and by best fit, each
   given up as soon as it is no better than the best so far. Of these the effort `fast` has the first one only, and none
   for more than 15,000 lives.
2. Rounds of growing effort (Luby et al. 1993), until the footprint is the bound, the search is exhausted, or the tries
   or the time are used up: one restart of `corner.search` with the bound for its capacity, its order drawn at random
   around a static key; and some tries of local search from the best orders.
3. Where the bound was shown to be out of reach, or nothing was found there, the capacity is halved in between: what is
   found below the incumbent replaces it.

Asking for the bound outright first is what makes the hard instances easy: see [Note: corners] in corner.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from torchdelta.pool import corner, greedy
from torchdelta.pool.local_search import improve
from torchdelta.pool.online import place_like_cnmem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torchdelta.pool.sections import Sections

MAX_ROUNDS: Final = 2000
_NODES_A_LIFE: Final = 16  # what a descent takes on real steps, waste included
_SCANNED: Final = 1_500_000  # sections that a restart of length 1 may look at beside that
_TRIES: Final = 40  # of local search in a round
_MOST_FOR_LOCAL_SEARCH: Final = 40_000
_MOST_FOR_CORNERS: Final = 20_000_000  # sections that lives cover, one by one
_MOST_AT_A_GLANCE: Final = 15_000
_NOISE: Final = 0.3


@dataclass(kw_only=True)
class _State:
    """What is known so far. Mutable."""

    sections: Sections
    sizes: NDArray[np.int64]
    bound: int  # no footprint is below it
    best: int
    offsets: NDArray[np.int64]
    ranked: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)  # static orders by their footprint

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
    bound = int(sections.load.max())
    state = _State(sections=sections, sizes=sizes, bound=bound, best=int(sizes.sum()) + 1, offsets=np.zeros_like(sizes))
    _try_online(state)
    if not state.is_done and (max_rounds or len(sizes) <= _MOST_AT_A_GLANCE):
        _try_orders(state, end_s, greedy.ORDERS if max_rounds else greedy.ORDERS[:1])
    generator = np.random.default_rng(seed)
    problem = None
    if max_rounds and not state.is_done and int((sections.last - sections.first).sum()) <= _MOST_FOR_CORNERS:
        problem = corner.make_problem(sections, sizes)
    target = state.bound
    for number in range(1, max_rounds + 1):
        if state.is_done or state.best <= enough or time.perf_counter() >= end_s:
            break
        if problem is not None:
            nodes = _NODES_A_LIFE * len(sizes) + _SCANNED // sections.num_sections * _luby(number)
            status, offsets, _ = corner.search(problem, target, _random_order(state, generator), nodes)
            if status == corner.FOUND:
                state.take(int((offsets + sizes).max()), offsets)
                target = state.bound
                continue
            if status == corner.EXHAUSTED:
                state.bound = target + 1
                target = state.bound
            elif number % _ROUNDS_A_TARGET == 0:
                target = _next_target(state, target)
        if len(sizes) <= _MOST_FOR_LOCAL_SEARCH:
            _, order = state.ranked[number % min(_NUM_STARTS, len(state.ranked))]
            state.take(*improve(sections, sizes, order, bound=state.bound, num_tries=_TRIES, seed=seed + number))
    return state.best, state.offsets, min(state.bound, state.best)


_ROUNDS_A_TARGET: Final = 64
_NUM_STARTS: Final = 4


def _try_online(state: _State) -> None:
    """Serve the lives as they come, forwards and backwards in time: next to no work, and close on real steps."""
    first, last = state.sections.first, state.sections.last
    state.take(*place_like_cnmem(first, last, state.sizes))
    if not state.is_done:
        state.take(*place_like_cnmem(-last, -first, state.sizes))


def _try_orders(state: _State, end_s: float, names: tuple[str, ...]) -> None:
    for name in names:
        order = greedy.static_order(name, state.sections, state.sizes)
        reached = 1 << 62
        for best_fit in (False, True):
            if state.is_done or time.perf_counter() >= end_s:
                break
            footprint, offsets = greedy.place_in_order(
                state.sections, state.sizes, order, best_fit=best_fit, limit=state.best
            )
            state.take(footprint, offsets)
            reached = min(reached, footprint)
        state.ranked.append((reached, order))
    state.ranked.sort(key=lambda each: each[0])


def _random_order(state: _State, generator: np.random.Generator) -> NDArray[np.int64]:
    width = (state.sections.last - state.sections.first).astype(np.float64)
    size = state.sizes.astype(np.float64)
    key = (size, width, size * width)[generator.integers(3)]
    noise = generator.normal(0.0, _NOISE * generator.integers(4), len(size))
    return np.argsort(-key * np.exp(noise), kind="stable")


def _next_target(state: _State, target: int) -> int:
    """Return another capacity to ask for: half-way to the incumbent, and the bound again when that is near."""
    middle = (target + state.best) // 2
    return middle if state.bound < middle < state.best - 1 else state.bound


def _luby(number: int) -> int:
    """Return the number-th term of 1, 1, 2, 1, 1, 2, 4, ..."""
    while True:
        power = number.bit_length()
        if number == (1 << power) - 1:
            return 1 << (power - 1)
        number -= (1 << (power - 1)) - 1
