"""A move of the default planner: the codes of a few neighbouring gaps at once, all combinations tried. Compiled.

Where memory is short, one buffer of a chain leaves another way only if its neighbours do too (swapped, it spares its
descendants the chain above it, which then may leave in turn), and every change by itself is worse. Gaps are neighbours
if their buffers are used again one after another: there replays share their chains.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.default.moves import Flags, is_better
from torchdelta.simulate.arrays import Codes, Static, Work
from torchdelta.simulate.compiled import compiled
from torchdelta.simulate.kernel import NO_CUT, measure

__all__ = ["try_windows"]


@compiled
def try_windows(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    order: NDArray[np.int64],
    width: int,
    rounds: int,
) -> tuple[int, float]:
    """Give each run of `width` gaps its best codes, in place; return excess and time.

    The order has neighbours beside one another. It is gone through `rounds` times at most, until nothing changes. Takes
    up to `5 ** width` evaluations a window, most of which are cut short.
    """
    now = measure(static, work, codes, limits, NO_CUT, np.inf)
    tried = np.zeros(width, np.int64)
    best_codes = codes.copy()
    for _ in range(rounds):
        changed = False
        for start in range(order.shape[0] - width + 1):
            tried[:] = 0
            while True:
                possible = True
                for place in range(width):
                    gap = order[start + place]
                    codes[gap] = tried[place]
                    possible = possible and allowed[gap, tried[place]]
                if possible:
                    most_s = now[1] * (1 - 1e-9) if now[0] == 0 else np.inf
                    found = measure(static, work, codes, limits, now[0], most_s)
                    if is_better(found, now):
                        now = found
                        best_codes[:] = codes
                        changed = True
                # The next combination, as one counts.
                place = 0
                while place < width and tried[place] == 4:
                    tried[place] = 0
                    place += 1
                if place == width:
                    break
                tried[place] += 1
            codes[:] = best_codes
        if not changed:
            break
    return now
