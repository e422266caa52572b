"""Moves of the default planner, compiled: each changes some decisions, and is judged by a whole simulation.

A decision is *better* than another if it passes the budget by less (summed over the ops) or, at equal excess, takes
less time. `release` goes downhill in excess, best gain for a second first; `improve` tries other codes one gap at a
time, `exchange` two gaps at once; `shake` takes some releases back and repairs at another place. What is surely worse
is not simulated to its end. All end after a number of steps that depends on the problem alone, and chance comes from a
generator with a fixed seed: the same problem gives the same plan.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchdelta.simulate.arrays import AGAIN, RECOMPUTE, Codes, Static, Work
from torchdelta.simulate.compiled import compiled, compiled_part
from torchdelta.simulate.kernel import NO_CUT, measure

__all__ = ["UNPRICED", "Flags", "Prices", "exchange", "improve", "is_better", "price_each", "release", "shake"]

Flags = NDArray[np.bool_]
Prices = NDArray[np.float64]

UNPRICED: Prices = np.empty((2, 0, 5))
"""In place of what `price_each` returns: nothing is known yet."""

_NUM_SAMPLED = 20
"""How many gaps, drawn at random, each repair of `shake` may change beside those near what was taken back."""

_TINY_S = 1e-9
"""Seconds added to what a release costs, so that one that costs nothing has a rate."""

# See [Note: typed constants] in simulate/kernel.py.
_NOBODY: Any = np.int64(-1)
_NO_NEIGHBOURS: Any = np.int64(0)
_ONCE: Any = np.int64(1)


@compiled_part
def is_better(found: tuple[int, float], now: tuple[int, float]) -> bool:
    """Return whether a decision's excess and time are better than another's, by more than rounding."""
    return found[0] < now[0] or (found[0] == now[0] and found[1] < now[1] * (1 - 1e-9))


@compiled_part
def _price(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    gap: int,
    prices: Prices,
) -> None:
    """Fill `prices[:, gap]`: excess and time if the gap alone changes, by code."""
    old = codes[gap]
    prices[:, gap] = np.inf
    for code in range(1, 5):
        if allowed[gap, code] and code != old:
            codes[gap] = code
            excess, time_s = measure(static, work, codes, limits, NO_CUT, np.inf)
            prices[0, gap, code], prices[1, gap, code] = excess, time_s
    codes[gap] = old


@compiled
def price_each(
    static: Static, work: Work, codes: Codes, limits: NDArray[np.int64], allowed: Flags, among: NDArray[np.int64]
) -> Prices:
    """Return what each change of one gap leads to: `[0, gap, code]` the excess, `[1, gap, code]` the time."""
    prices = np.full((2, codes.shape[0], 5), np.inf)
    for index in range(among.shape[0]):
        _price(static, work, codes, limits, allowed, among[index], prices)
    return prices


@compiled_part
def _rate(
    static: Static, link_price: float, gap: int, now: tuple[int, float], prices: Prices, ratio: NDArray[np.float64]
) -> None:
    """Fill `ratio[gap]`: what each release gains, in byte-moments above the budget, for each second it costs."""
    for code in range(1, 5):
        gain = now[0] - prices[0, gap, code]
        ratio[gap, code] = -1.0
        if gain > 0:
            cost = max(prices[1, gap, code] - now[1], 0.0) + _TINY_S
            if code <= 2:
                cost += link_price * static.size[static.gap_buffer[gap]] / static.rates[0]
            ratio[gap, code] = gain / cost


@compiled
def release(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    among: NDArray[np.int64],
    link_price: float,
    neighbours: int,
    first_prices: Prices,
) -> tuple[int, float]:
    """Change codes, in place, until the budget holds or nothing helps; return excess and time.

    Lazy: prices are kept until a gap comes up as the best, and then looked at again; a gap's neighbours in time, whose
    chains it shares, are priced anew at once.

    The gaps `among` others may change. `link_price` is the added cost of a swap, as a share of its transfer's time;
    so many `neighbours` on either side are priced anew; `first_prices` is what `price_each` says of the start, or
    `UNPRICED`.
    """
    now = measure(static, work, codes, limits, NO_CUT, np.inf)
    if now[0] == 0:
        return now
    prices = (
        price_each(static, work, codes, limits, allowed, among) if first_prices.shape[1] == 0 else first_prices.copy()
    )
    ratio = np.full((codes.shape[0], 5), -1.0)
    for index in range(among.shape[0]):
        _rate(static, link_price, among[index], now, prices, ratio)
    stale_rounds = 0
    while now[0] > 0:
        best, best_ratio, second = _NOBODY, 0.0, 0.0
        for index in range(among.shape[0]):
            gap = among[index]
            for code in range(1, 5):
                if ratio[gap, code] > best_ratio:
                    if gap != best:
                        second = best_ratio
                    best, best_ratio = gap, ratio[gap, code]
                elif ratio[gap, code] > second and gap != best:
                    second = ratio[gap, code]
        if best < 0:
            # Prices may have been taken before others left: look once more at everything.
            stale_rounds += 1
            if stale_rounds > 2:
                break
            for index in range(among.shape[0]):
                _price(static, work, codes, limits, allowed, among[index], prices)
                _rate(static, link_price, among[index], now, prices, ratio)
            continue
        _price(static, work, codes, limits, allowed, best, prices)
        _rate(static, link_price, best, now, prices, ratio)
        fresh, fresh_code = 0.0, 0
        for code in range(1, 5):
            if ratio[best, code] > fresh:
                fresh, fresh_code = ratio[best, code], code
        if fresh_code == 0 or fresh < 0.9 * second:
            continue
        codes[best] = fresh_code
        now = (int(prices[0, best, fresh_code]), prices[1, best, fresh_code])
        stale_rounds = 0
        prices[:, best] = np.inf
        ratio[best, :] = -1.0
        for other in range(max(0, best - neighbours), min(codes.shape[0], best + neighbours + 1)):
            gains = False
            for code in range(1, 5):
                gains = gains or ratio[other, code] > 0.0
            if codes[other] == 0 and gains:
                _price(static, work, codes, limits, allowed, other, prices)
                _rate(static, link_price, other, now, prices, ratio)
    return now


@compiled_part
def _alone(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    gap: int,
    now: tuple[int, float],
    changed: NDArray[np.int64],
) -> tuple[int, float]:
    """Drop a buffer, and let its replay free again what it meets on the way; undone if that is not better.

    One move, because its halves are none: what a replay meets stays from there on, which is too much where memory is
    short, and to free it again gains nothing while no replay runs in between.
    """
    old = codes[gap]
    codes[gap] = RECOMPUTE
    measure(static, work, codes, limits, NO_CUT, np.inf)
    num_changed = 0
    for other in range(codes.shape[0]):
        met = work.return_op[other] == static.gap_next[gap] and static.gap_next[other] > static.gap_next[gap]
        if codes[other] == RECOMPUTE and met and allowed[other, AGAIN]:
            codes[other] = AGAIN
            changed[num_changed] = other
            num_changed += 1
    if num_changed:
        most_s = now[1] * (1 + 1e-9) if now[0] == 0 else np.inf
        found = measure(static, work, codes, limits, now[0], most_s)
        if is_better(found, now):
            return found
    for number in range(num_changed):
        codes[changed[number]] = RECOMPUTE
    codes[gap] = old
    return now


@compiled
def improve(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    order: NDArray[np.int64],
    rounds: int,
) -> tuple[int, float]:
    """Try every other code, KEEP first, gap by gap in the given order, and keep what is better; then `_alone`."""
    now = measure(static, work, codes, limits, NO_CUT, np.inf)
    freed = np.empty(codes.shape[0], np.int64)
    for _ in range(rounds):
        changed = False
        for index in range(order.shape[0]):
            gap = order[index]
            old = codes[gap]
            best = old
            for code in range(5):
                if code == old or not allowed[gap, code]:
                    continue
                if now[0] == 0 and code != 0 and best == 0:
                    continue  # what stays costs nothing by itself
                codes[gap] = code
                # More excess is worse at any time; at the budget, more time is.
                most_s = now[1] * (1 + 1e-9) if now[0] == 0 else np.inf
                found = measure(static, work, codes, limits, now[0], most_s)
                # At equal cost a buffer that stays is the better plan.
                if is_better(found, now) or (code == 0 and found[0] == now[0] and found[1] <= now[1]):
                    now = found
                    best = code
                    changed = True
            codes[gap] = best
            if allowed[gap, AGAIN] and (now[0] > 0 or best != 0):
                found = _alone(static, work, codes, limits, allowed, gap, now, freed)
                changed = changed or found != now
                now = found
        if not changed:
            break
    return now


@compiled
def exchange(
    static: Static, work: Work, codes: Codes, limits: NDArray[np.int64], allowed: Flags, most: int
) -> tuple[int, float]:
    """Change two gaps at once where both together are better; return excess and time.

    Each change that would save time and pass the budget is repaired by one other, the first that does. For decisions
    that hold the budget, and few gaps: ends after `most` evaluations.
    """
    num_gaps = codes.shape[0]
    now = measure(static, work, codes, limits, NO_CUT, np.inf)
    done = 0
    since = 0  # gaps tried since the last change
    gap = 0
    while now[0] == 0 and since < num_gaps and done < most:
        old = codes[gap]
        changed = False
        for code in range(5):
            if changed or code == old or not allowed[gap, code]:
                continue
            codes[gap] = code
            done += 1
            # No sum of bytes is cut here: only what would save time is worth a repair.
            if measure(static, work, codes, limits, NO_CUT, now[1] * (1 - 1e-6))[1] == np.inf:
                continue
            for other in range(num_gaps):
                was = codes[other]
                if other == gap or changed:
                    continue
                for repair in range(5):
                    if repair == was or not allowed[other, repair]:
                        continue
                    codes[other] = repair
                    done += 1
                    found = measure(static, work, codes, limits, now[0], now[1] * (1 - 1e-6))
                    if found[0] == 0:
                        now = found
                        changed = True
                        break
                    codes[other] = was
        since += 1
        if changed:
            since = 0
        else:
            codes[gap] = old
        gap = (gap + 1) % num_gaps
    return now


@compiled
def shake(
    static: Static,
    work: Work,
    codes: Codes,
    limits: NDArray[np.int64],
    allowed: Flags,
    steps: int,
    reach: int,
    slack: float,
    seed: int,
) -> tuple[int, float]:
    """Take a few releases back, repair around, and go on from the result; leave the best one in `codes`.

    Half of the steps choose gaps that follow one another, whose chains are shared, half choose any. A result that is a
    little slower is gone on from too, by ever less (threshold accepting): where memory is short, better plans lie
    behind worse ones. Returns excess and time.
    """
    num_gaps = codes.shape[0]
    now = measure(static, work, codes, limits, NO_CUT, np.inf)
    state = seed
    old = codes.copy()
    unpriced = np.empty((2, 0, 5))  # a global array would be of a type of its own: readonly
    best, best_codes = now, codes.copy()
    plain_s = static.time_s.sum()
    for step in range(steps):
        old[:] = codes
        state = (state * 1103515245 + 12345) % 2147483648
        size = 1 + (state >> 8) % reach
        chosen = np.zeros(num_gaps, np.bool_)
        state = (state * 1103515245 + 12345) % 2147483648
        start = (state >> 8) % num_gaps
        for number in range(size):
            gap = (start + number) % num_gaps
            if step % 2:
                state = (state * 1103515245 + 12345) % 2147483648
                gap = (state >> 8) % num_gaps
            state = (state * 1103515245 + 12345) % 2147483648
            code = 0
            if step % 4 >= 2:
                code = (state >> 8) % 5
            codes[gap] = code if allowed[gap, code] else 0
            chosen[gap] = True
        # Repair with what changed, with what follows and precedes a row, and with a sample of the others.
        if step % 2 == 0:
            for number in range(-3, size + 3):
                chosen[(start + number) % num_gaps] = True
        for _ in range(_NUM_SAMPLED):
            state = (state * 1103515245 + 12345) % 2147483648
            chosen[(state >> 8) % num_gaps] = True
        among = np.flatnonzero(chosen)
        found = release(static, work, codes, limits, allowed, among, 0.0, _NO_NEIGHBOURS, unpriced)
        if found[0] <= now[0] and found[1] < now[1] * 1.02:
            touched = among[codes[among] != 0]
            found = improve(static, work, codes, limits, allowed, touched, _ONCE)
        allowed_s = slack * (1 - step / steps) * max(best[1] - plain_s, 0.0)
        if found[0] < now[0] or (found[0] == now[0] and found[1] < max(now[1] * (1 - 1e-9), best[1] + allowed_s)):
            now = found
            if is_better(now, best):
                best = now
                best_codes[:] = codes
        else:
            codes[:] = old
    codes[:] = best_codes
    return best
