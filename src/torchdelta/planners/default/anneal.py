"""A move of the default planner: simulated annealing, for budgets near the least one. Compiled.

Where memory is short a better plan can lie behind many worse ones, and behind some that do not fit: what every other
buffer does depends on which few large ones stay. So decisions that pass the budget are gone through here, at a price
that rises until they are left; slower ones with a chance that falls (Kirkpatrick, Gelatt and Vecchi, Science 1983).
"""

import math

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.default.moves import Flags
from torchdelta.simulate.arrays import Codes, Static, Work
from torchdelta.simulate.compiled import compiled, compiled_part
from torchdelta.simulate.kernel import NO_CUT, measure

__all__ = ["anneal"]

_PRICES = (3.0, 100.0)
"""Price of an excess of one whole budget at one op, in multiples of `unit_s`, at the first step and at the last."""

_STEPS_A_HEAT = 64
"""After so many steps heat and price are brought up to date."""

_REACH = 8
"""Half of the steps change gaps that are at most this far from each other."""

_MOST_CHANGES = 4
"""The most gaps that one step changes."""


@compiled_part
def _chance(state: NDArray[np.uint64]) -> float:
    """Return the next random number from 0 up to 1 (Marsaglia's xorshift, 64 bits: millions are drawn)."""
    bits = state[0]
    bits ^= bits << np.uint64(13)
    bits ^= bits >> np.uint64(7)
    bits ^= bits << np.uint64(17)
    state[0] = bits
    return float(bits >> np.uint64(11)) / 9007199254740992.0


@compiled
def anneal(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    order: NDArray[np.int64],
    unit_s: float,
    heats: tuple[float, float],
    steps: int,
    seed: int,
) -> tuple[int, float]:
    """Change one to four gaps at a time, in place; leave the fastest decision within the budget that was met.

    Returns excess and time, `NO_CUT` and infinity (and the codes as they were) if none was met on the way. The start
    itself does not count, so what comes back may be slower than it.

    Args:
        static: The arrays of the problem.
        work: The arrays that an evaluation writes.
        codes: Where to start; the result.
        limits: See `evaluate`.
        allowed: Which codes each gap may take; at least two of those in `order`.
        order: The gaps that may change, at least one, neighbours beside one another.
        unit_s: What heats and prices are multiples of: the seconds that a plan costs, more than none.
        heats: The time that is let pass with a chance of 1/e, at the first step and at the last.
        steps: How many changes are tried.
        seed: Of its chance, 0 or more.
    """
    state = np.array([np.uint64(seed) * np.uint64(2654435761) + np.uint64(88172645463325252)], np.uint64)
    for _ in range(10):
        _chance(state)
    num_gaps = order.shape[0]
    budget = float(max(limits[0], 1))
    best_s, best_codes = np.inf, codes.copy()
    excess, time_s = measure(static, work, codes, limits, NO_CUT, np.inf)
    heat, price, now = 0.0, 0.0, 0.0
    places = np.zeros(_MOST_CHANGES, np.int64)
    before = np.zeros(_MOST_CHANGES, np.int8)
    for step in range(steps):
        if step % _STEPS_A_HEAT == 0:
            done = step / steps
            heat = unit_s * heats[0] * (heats[1] / heats[0]) ** done
            price = unit_s * _PRICES[0] * (_PRICES[1] / _PRICES[0]) ** done
            now = time_s + price * (excess / budget)
        drawn = _chance(state)
        num_changes = 1 if drawn < 0.5 else 2 if drawn < 0.8 else 3 if drawn < 0.95 else _MOST_CHANGES
        beside = _chance(state) < 0.5
        first = int(_chance(state) * num_gaps)
        for number in range(num_changes):
            drawn = _chance(state)
            place = (first + int(drawn * _REACH)) % num_gaps if beside else int(drawn * num_gaps)
            gap = order[place]
            code = int(_chance(state) * 5)
            while code == codes[gap] or not allowed[gap, code]:
                code = int(_chance(state) * 5)
            places[number], before[number] = gap, codes[gap]
            codes[gap] = code
        # Drawn first, so that what is surely refused is not simulated to its end.
        most = now - heat * math.log(max(_chance(state), 1e-300))
        found, found_s = measure(static, work, codes, limits, int(min(most / price * budget, 1e18)), most)
        if found_s + price * (found / budget) <= most:
            excess, time_s = found, found_s
            now = time_s + price * (excess / budget)
            if excess == 0 and time_s < best_s * (1 - 1e-9):
                best_s = time_s
                best_codes[:] = codes
        else:
            for number in range(num_changes - 1, -1, -1):
                codes[places[number]] = before[number]
    codes[:] = best_codes
    return (0, best_s) if best_s < np.inf else (NO_CUT, np.inf)
