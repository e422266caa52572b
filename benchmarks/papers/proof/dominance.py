"""Which of many states may be forgotten, compiled: those that another one makes needless."""

from typing import Any

import numpy as np
from numba import njit

from benchmarks.papers.proof.states import (
    IN_S,
    KEPT_BYTES,
    LOST_S,
    NUM_IN,
    NUM_OUT,
    OUT_S,
    QUEUE,
    ROUNDING_S,
    Nest,
    States,
    pass_time,
)

__all__ = ["best_of"]


@njit(cache=True)
def _is_below(nest: Any, queue: Any, other: Any, busy_s: Any, other_s: Any, is_out: bool) -> bool:
    """Tell whether the copies under way take at no time more room than another queue's, nor the link longer."""
    if busy_s > other_s + ROUNDING_S:
        return False
    first, count = (0, NUM_OUT) if is_out else (QUEUE, NUM_IN)
    copy_s = nest.out_s if is_out else nest.in_s
    mine, theirs = 0.0, 0.0
    my_end, their_end = busy_s, other_s
    for index in range(queue[count]):
        mine += nest.size_bytes[queue[first + index]]
        my_end -= copy_s[queue[first + index]]
    for index in range(other[count]):
        theirs += nest.size_bytes[other[first + index]]
        their_end -= copy_s[other[first + index]]
    if mine > theirs:
        return False
    at = 0
    for index in range(other[count]):  # mine only falls: it is looked at where theirs falls
        theirs -= nest.size_bytes[other[first + index]]
        their_end += copy_s[other[first + index]]
        while at < queue[count] and my_end + copy_s[queue[first + at]] <= their_end + ROUNDING_S:
            mine -= nest.size_bytes[queue[first + at]]
            my_end += copy_s[queue[first + at]]
            at += 1
        if mine > theirs:
            return False
    return True


@njit(cache=True)
def _makes_needless(nest: Any, states: Any, row: Any, other: Any) -> bool:
    """Tell whether a state makes another one needless, as far as masks and queues say.

    It may do so with copies that end a little earlier than they do: then they do from here on.
    """
    masks, floats, queues = states
    for column in range(masks.shape[1]):
        if masks[row, column] != masks[other, column]:
            return False
    out_s, in_s = min(floats[row, OUT_S], floats[other, OUT_S]), min(floats[row, IN_S], floats[other, IN_S])
    if out_s == floats[row, OUT_S] and in_s == floats[row, IN_S]:
        return _is_below(nest, queues[row], queues[other], out_s, floats[other, OUT_S], True) and _is_below(
            nest, queues[row], queues[other], in_s, floats[other, IN_S], False
        )
    queue = queues[row].copy()
    queue[NUM_OUT], out_s = pass_time(
        queue, 0, queue[NUM_OUT], floats[row, OUT_S], floats[row, OUT_S] - out_s, nest.out_s
    )
    queue[NUM_IN], in_s = pass_time(queue, QUEUE, queue[NUM_IN], floats[row, IN_S], floats[row, IN_S] - in_s, nest.in_s)
    if _is_below(nest, queue, queues[other], out_s, floats[other, OUT_S], True) and _is_below(
        nest, queue, queues[other], in_s, floats[other, IN_S], False
    ):
        queues[row] = queue
        floats[row, OUT_S], floats[row, IN_S] = out_s, in_s
        return True
    return False


@njit(cache=True)
def _needed(nest: Any, states: Any, order: Any, groups: Any, slack_s: Any) -> Any:
    """Return the states that no other one makes needless; of two that differ by less than the slack the easier parts.

    `order` has those with the same number in `groups` beside each other, those that lost less first.
    """
    floats = states[1]
    kept = np.empty(order.shape[0], np.int64)
    # What rules most pairs out stands side by side: bytes kept, both links' times, time lost.
    kept_bytes, lost_s = np.empty(order.shape[0], np.float64), np.empty(order.shape[0], np.float64)
    out_s, in_s = np.empty(order.shape[0], np.float64), np.empty(order.shape[0], np.float64)
    num_kept = 0
    start = 0
    for index in range(order.shape[0]):
        row = order[index]
        if index and groups[row] != groups[order[index - 1]]:
            start = num_kept
        its_bytes, its_out_s, its_in_s = floats[row, KEPT_BYTES], floats[row, OUT_S], floats[row, IN_S]
        its_lost_s = floats[row, LOST_S]
        is_needless = False
        for place in range(start, num_kept):
            if (
                kept_bytes[place] <= its_bytes
                and out_s[place] <= its_out_s + slack_s
                and in_s[place] <= its_in_s + slack_s
                and _makes_needless(nest, states, kept[place], row)
            ):
                out_s[place], in_s[place] = floats[kept[place], OUT_S], floats[kept[place], IN_S]
                is_needless = True
                break
            if (
                its_lost_s <= lost_s[place] + 0.2 * slack_s
                and its_bytes <= kept_bytes[place]
                and its_out_s <= out_s[place] + slack_s
                and its_in_s <= in_s[place] + slack_s
                and _makes_needless(nest, states, row, kept[place])
            ):
                floats[row, LOST_S] = lost_s[place]
                kept[place], kept_bytes[place], is_needless = row, its_bytes, True
                out_s[place], in_s[place] = floats[row, OUT_S], floats[row, IN_S]
                break
        if not is_needless:
            kept[num_kept] = row
            kept_bytes[num_kept], out_s[num_kept], in_s[num_kept] = its_bytes, its_out_s, its_in_s
            lost_s[num_kept] = its_lost_s
            num_kept += 1
    return kept[:num_kept]


def best_of(nest: Nest, states: States, number: int, slack_s: float) -> States:
    """Return the first `number` states without those that another one makes needless."""
    masks, floats, queues = states[0][:number], states[1][:number], states[2][:number]
    hashes = np.zeros(number, np.uint64)
    for column in range(masks.shape[1]):  # who has the same masks has the same number; who has others may have it, too
        hashes = (hashes ^ masks[:, column].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    order = np.lexsort((floats[:, LOST_S], hashes))
    rows = _needed(nest, (masks, floats, queues), order, hashes, slack_s)
    return masks[rows], floats[rows], queues[rows]
