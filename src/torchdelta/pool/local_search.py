"""Local search over orders: what touches the peak is placed earlier, and everything is placed again by first fit.

An order is as good as the footprint of its placement, which is given up as soon as it passes the incumbent's, so that
most tries cost little. Moves that leave the footprint as it is are accepted: long plateaus are what makes it work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from torchdelta.pool.greedy import place_in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torchdelta.pool.sections import Sections

_SHARE_OF_PEAK_MOVES = 0.6
_SHARE_OF_MOVES = 0.8  # the rest swaps two
_SHARE_OF_UPHILL = 0.03
_UPHILL = 128  # a share of the footprint


def improve(
    sections: Sections,
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    *,
    bound: int,
    num_tries: int,
    seed: int,
) -> tuple[int, NDArray[np.int64]]:
    """Improve an order.

    Args:
        sections: Where the lives are.
        sizes: Their sizes.
        order: Where to start.
        bound: Stop as soon as a placement is not above it.
        num_tries: Placements to try.
        seed: Of the moves.

    Returns:
        The least footprint that was met, and its offsets.
    """
    generator = np.random.default_rng(seed)
    order = order.copy()
    unlimited = int(sizes.sum())
    footprint, offsets = place_in_order(sections, sizes, order, best_fit=False, limit=unlimited)
    best, best_offsets = footprint, offsets
    num = len(order)
    for _ in range(num_tries):
        if best <= bound or num < 2:
            break
        kind, a, b = generator.random(), int(generator.integers(num)), int(generator.integers(num))
        if kind < _SHARE_OF_PEAK_MOVES:
            at_peak = np.flatnonzero(offsets[order] + sizes[order] == footprint)
            a = int(at_peak[a % len(at_peak)])
            b = int(b % max(1, a))
        tried = _swapped(order, a, b) if kind >= _SHARE_OF_MOVES else _moved(order, a, b)
        limit = footprint + footprint // _UPHILL if generator.random() < _SHARE_OF_UPHILL else footprint
        tried_footprint, tried_offsets = place_in_order(sections, sizes, tried, best_fit=False, limit=limit)
        if tried_footprint > limit:
            continue
        order, footprint, offsets = tried, tried_footprint, tried_offsets
        if footprint < best:
            best, best_offsets = footprint, offsets
    return best, best_offsets


@njit(cache=True)
def _moved(order: NDArray[np.int64], source: int, target: int) -> NDArray[np.int64]:
    out = order.copy()
    life = order[source]
    if target < source:
        out[target + 1 : source + 1] = order[target:source]
    else:
        out[source:target] = order[source + 1 : target + 1]
    out[target] = life
    return out


def _swapped(order: NDArray[np.int64], a: int, b: int) -> NDArray[np.int64]:
    out = order.copy()
    out[a], out[b] = order[b], order[a]
    return out
