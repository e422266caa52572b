"""The states of the bound by nesting, compiled: what they hold, and how time passes in them.

`bound.py` says what a state is and why nothing here can make the bound too high. States are rows of three arrays: masks
of candidates (two words each, by position), numbers, and the two queues of copies under way.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.papers.proof.stale_code import forget_stale_code

__all__ = [
    "HELD",
    "HELD_BYTES",
    "HELD_S",
    "HELD_SWAP",
    "IN_S",
    "KEPT",
    "KEPT_BYTES",
    "LEAVING",
    "LOST_S",
    "MAX_CANDIDATES",
    "NUM_IN",
    "NUM_OUT",
    "OUT_S",
    "PULLED",
    "QUEUE",
    "ROUNDING_S",
    "STAYING",
    "STAYING_BYTES",
    "WORD",
    "Floats",
    "Ints",
    "Nest",
    "States",
    "begin",
    "enqueue",
    "finish",
    "has",
    "look_ahead",
    "pass_time",
    "put",
    "run_backward",
    "run_forward",
    "take",
]

forget_stale_code((Path(__file__).parent,))  # here, because everything compiled in this folder imports this file first

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WORD = 62
MAX_CANDIDATES = 2 * WORD
"""A mask is two words."""

LEAVING, STAYING, KEPT, HELD, HELD_SWAP, PULLED, _NUM_MASKS = 0, 2, 4, 6, 8, 10, 11
"""Masks: swapped or kept, and forward has not come to the last use yet; kept, as far as somebody may still be made from
them; promised to be there for a replay; those of the promised that were swapped. One word: whether an earlier replay
for the op has had copies brought back."""
KEPT_BYTES, STAYING_BYTES, HELD_BYTES, HELD_S, OUT_S, IN_S, LOST_S, _NUM_FLOATS = range(8)
"""What stays, and what of it forward still uses; what is held, and the time of the replays that it still owes; until
when each link is busy; all that was lost so far."""

QUEUE = 30
"""Copies under way each way; of more, the first ones are forgotten."""
NUM_OUT, NUM_IN, _WIDTH = 2 * QUEUE, 2 * QUEUE + 1, 2 * QUEUE + 2

ROUNDING_S = 1e-12


class Nest(NamedTuple):
    """A step as the bound sees it: candidates by the order in which backward needs them, last one first.

    Attributes:
        time_s: Of each op.
        least_bytes: At each op, everybody away who can be.
        size_bytes: Of each candidate.
        out_s: What its copy out takes.
        in_s: What its copy back takes.
        replay_s: What is paid if it is recomputed: ops of several candidates by the first of them.
        help_s: For how long its replay lets the links work: all that surely runs.
        last_op: Its last use in forward.
        next_op: Its first use after forward.
        can_replay: Whether it may be recomputed.
        parents: Where those of each begin in `parent`, and where the last end.
        parent: Positions of who has to be there when it is made again.
        children: The same for those that are made from it.
        child: Their positions.
        ancestors: Two words each: those that it is made from, at any remove.
        releases: Where the candidates begin in `release` whose last use in forward is each op.
        release: Their positions.
        forward_end: After who is decided, forward is known before this op.
        budget_bytes: One number.
    """

    time_s: Floats
    least_bytes: Floats
    size_bytes: Floats
    out_s: Floats
    in_s: Floats
    replay_s: Floats
    help_s: Floats
    last_op: Ints
    next_op: Ints
    can_replay: Ints
    parents: Ints
    parent: Ints
    children: Ints
    child: Ints
    ancestors: Ints
    releases: Ints
    release: Ints
    forward_end: Ints
    budget_bytes: Floats


States = tuple[Ints, Floats, NDArray[np.int16]]
"""Rows of masks, of numbers, and of queues. Mutable."""


def begin() -> States:
    """Return the one state in which nothing has been decided."""
    return (
        np.zeros((1, _NUM_MASKS), np.int64),
        np.zeros((1, _NUM_FLOATS), np.float64),
        np.zeros((1, _WIDTH), np.int16),
    )


@njit(cache=True, inline="always")
def has(mask: Any, at: Any, position: Any) -> Any:
    """Tell whether a candidate is in the mask that begins at a word."""
    return (mask[at + position // WORD] >> (position % WORD)) & 1


@njit(cache=True, inline="always")
def put(mask: Any, at: Any, position: Any) -> None:
    """Put a candidate into the mask that begins at a word."""
    mask[at + position // WORD] |= np.int64(1) << (position % WORD)


@njit(cache=True, inline="always")
def take(mask: Any, at: Any, position: Any) -> None:
    """Take a candidate out of the mask that begins at a word."""
    mask[at + position // WORD] &= ~(np.int64(1) << (position % WORD))


@njit(cache=True)
def pass_time(queue: Any, first: Any, number: Any, busy_s: Any, elapsed_s: Any, copy_s: Any) -> tuple[Any, Any]:
    """Let time pass: return how many copies are still under way, and how long the link is still busy."""
    busy_s -= elapsed_s
    if busy_s <= 0.0:
        return 0, 0.0
    later_s = 0.0
    keep = number
    for index in range(number - 1, -1, -1):
        if busy_s - later_s <= ROUNDING_S:
            break
        keep = index
        later_s += copy_s[queue[first + index]]
    if keep:
        for index in range(keep, number):
            queue[first + index - keep] = queue[first + index]
    return number - keep, busy_s


@njit(cache=True)
def _wait(queue: Any, first: Any, number: Any, busy_s: Any, copy_s: Any, size: Any, over: Any) -> Any:
    """Return how long it takes until copies of so many bytes have ended; negative if never."""
    later_s = 0.0
    under_way = 0.0
    for index in range(number):
        later_s += copy_s[queue[first + index]]
        under_way += size[queue[first + index]]
    if under_way < over:
        return -1.0
    for index in range(number):
        later_s -= copy_s[queue[first + index]]
        over -= size[queue[first + index]]
        if over <= 0.0:
            return max(busy_s - later_s, 0.0)
    return -1.0


@njit(cache=True)
def _run(nest: Any, floats: Any, queue: Any, op: Any, fixed: Any, is_out: bool) -> bool:
    """Let an op run beside the copies of one direction; False if it never fits."""
    first, count, busy = (0, NUM_OUT, OUT_S) if is_out else (QUEUE, NUM_IN, IN_S)
    copy_s = nest.out_s if is_out else nest.in_s
    budget = nest.budget_bytes[0]
    if fixed > budget:
        return False
    number = queue[count]
    total = fixed
    for index in range(number):
        total += nest.size_bytes[queue[first + index]]
    elapsed_s = nest.time_s[op]
    if total > budget:
        wait_s = _wait(queue, first, number, floats[busy], copy_s, nest.size_bytes, total - budget)
        if wait_s < 0.0:
            return False
        floats[LOST_S] += wait_s
        elapsed_s += wait_s
    queue[count], floats[busy] = pass_time(queue, first, number, floats[busy], elapsed_s, copy_s)
    return True


@njit(cache=True)
def enqueue(nest: Any, floats: Any, queue: Any, position: Any, is_out: bool) -> None:
    """Queue a copy behind the others of its link; where they are too many the first one is forgotten."""
    first, count, busy = (0, NUM_OUT, OUT_S) if is_out else (QUEUE, NUM_IN, IN_S)
    if queue[count] == QUEUE:
        for index in range(1, QUEUE):
            queue[first + index - 1] = queue[first + index]
        queue[count] -= 1
    queue[first + queue[count]] = position
    queue[count] += 1
    floats[busy] += nest.out_s[position] if is_out else nest.in_s[position]


@njit(cache=True)
def run_forward(nest: Any, mask: Any, floats: Any, queue: Any, begin: Any, end: Any) -> bool:
    """Run ops of forward: what stays counts from the op after its last use, what leaves is queued after that."""
    for op in range(begin, end):
        fixed = nest.least_bytes[op] + floats[KEPT_BYTES] - floats[STAYING_BYTES]
        if not _run(nest, floats, queue, op, fixed, True):
            return False
        for index in range(nest.releases[op], nest.releases[op + 1]):
            position = nest.release[index]
            if has(mask, STAYING, position):
                take(mask, STAYING, position)
                floats[STAYING_BYTES] -= nest.size_bytes[position]
            elif has(mask, LEAVING, position):
                take(mask, LEAVING, position)
                enqueue(nest, floats, queue, position, True)
    return True


@njit(cache=True)
def run_backward(nest: Any, floats: Any, queue: Any, begin: Any, end: Any) -> bool:
    """Run ops of backward, the last one first: who is held is there, who is used later is not, or still comes."""
    fixed = floats[KEPT_BYTES] + floats[HELD_BYTES]
    for op in range(begin, end, -1):  # noqa: SIM110 - numba has no generators to give to `all`
        if not _run(nest, floats, queue, op, nest.least_bytes[op] + fixed, False):
            return False
    return True


@njit(cache=True)
def finish(nest: Any, states: Any, middle: Any) -> Any:
    """Return what each state has lost, replays that it still owes included, when the middle of the step is reached.

    Infinite where it does not fit. `middle` is the op at which backward begins, or -1: no further than now.
    """
    masks, floats, queues = states
    lost_s = np.empty(masks.shape[0], np.float64)
    num_candidates = nest.last_op.shape[0]
    for row in range(masks.shape[0]):
        fits = True
        if middle >= 0:
            last = num_candidates - 1
            fits = run_forward(nest, masks[row], floats[row], queues[row], nest.forward_end[last], middle)
            fits = fits and run_backward(nest, floats[row], queues[row], nest.next_op[last] - 1, middle - 1)
        lost_s[row] = floats[row, LOST_S] + floats[row, HELD_S] if fits else np.inf
    return lost_s


@njit(cache=True)
def _bytes_to_come(nest: Any, queue: Any, busy_s: Any, bytes_per_s: Any, is_out: bool) -> Any:
    """Return bytes of the copies under way that a link cannot have moved before so much time has passed, at least."""
    first, count = (0, NUM_OUT) if is_out else (QUEUE, NUM_IN)
    copy_s = nest.out_s if is_out else nest.in_s
    total = 0.0
    for index in range(queue[count] - 1, -1, -1):
        item = queue[first + index]
        if copy_s[item] > 0.0:
            total += min(nest.size_bytes[item], max(busy_s, 0.0) * bytes_per_s)
        busy_s -= copy_s[item]
    return total


@njit(cache=True)
def _in_the_way(nest: Any, queue: Any, busy_s: Any, elapsed_s: Any, bytes_per_s: Any, slope: Any, is_out: bool) -> Any:
    """Return bytes such that after a wait the copies under way take so many, less `slope` for each second of the wait.

    Whole copies: memory is free only when one has ended. Where all have ended before, less than nothing: what the link
    has carried since of others that were queued behind them.
    """
    first, count = (0, NUM_OUT) if is_out else (QUEUE, NUM_IN)
    copy_s = nest.out_s if is_out else nest.in_s
    if busy_s <= elapsed_s:
        return -bytes_per_s * (elapsed_s - busy_s)
    later_s, under_way = 0.0, 0.0
    least = slope * (busy_s - elapsed_s)
    for index in range(queue[count] - 1, -1, -1):
        item = queue[first + index]
        if busy_s - later_s <= elapsed_s:
            break
        later_s += copy_s[item]
        under_way += nest.size_bytes[item]
        least = min(least, under_way + slope * max(busy_s - later_s - elapsed_s, 0.0))
    return least


@njit(cache=True)
def look_ahead(nest: Any, states: Any, position: Any, rates: Any, slopes: Any, out_ops: Any, in_ops: Any) -> Any:
    """Return of each state what the inner part will have to bear, whatever is decided there.

    Args:
        nest: The step.
        states: Those in which all before `position` are decided.
        position: The first candidate that is not decided.
        rates: Bytes per second of the links, out and in.
        slopes: How many times as fast as a link memory may become free while compute waits.
        out_ops: Ops of forward, not known yet, that rise.
        in_ops: Ops of backward, not known yet, that fall.

    Returns:
        A row for each state. Bytes under way out and in. For each slope, for each of `out_ops` and of `in_ops`, bytes
        that the copies now under way take there, if `slope` times what the link carries in a wait is taken off. The
        waits in forward up to each of `out_ops`, and in backward (where replays help as well) up to each of `in_ops`,
        infinite where it does not fit.
    """
    masks, floats, queues = states
    num_looks = out_ops.shape[0] + in_ops.shape[0]
    found = np.zeros((masks.shape[0], 2 + (1 + slopes.shape[0]) * num_looks), np.float64)
    mask, values, queue = masks[0].copy(), floats[0].copy(), queues[0].copy()
    for row in range(masks.shape[0]):
        lost_s = floats[row, LOST_S]
        for side in range(2):
            is_out = side == 0
            busy_s = floats[row, OUT_S if is_out else IN_S]
            found[row, side] = _bytes_to_come(nest, queues[row], busy_s, rates[side], is_out)
            mask[:], values[:], queue[:] = masks[row], floats[row], queues[row]
            values[HELD_BYTES] = 0.0
            ops = out_ops if is_out else in_ops
            place = 0 if is_out else out_ops.shape[0]
            op = nest.forward_end[position - 1] if is_out else nest.next_op[position - 1] - 1
            known, elapsed_s = op, 0.0
            fits = True
            for index in range(ops.shape[0]):
                while known != ops[index]:
                    elapsed_s += nest.time_s[known]
                    known += 1 if is_out else -1
                for number in range(slopes.shape[0]):
                    found[row, 2 + number * num_looks + place + index] = _in_the_way(
                        nest, queues[row], busy_s, elapsed_s, rates[side], slopes[number] * rates[side], is_out
                    )
                # Nothing is under way any more, nor will be: whoever then does not fit is told by other rows.
                if queue[NUM_OUT if is_out else NUM_IN] or (is_out and (mask[LEAVING] or mask[LEAVING + 1])):
                    if is_out:
                        fits = fits and run_forward(nest, mask, values, queue, op, ops[index] + 1)
                        op = ops[index] + 1
                    else:
                        fits = fits and run_backward(nest, values, queue, op, ops[index] - 1)
                        op = ops[index] - 1
                waits = 2 + slopes.shape[0] * num_looks
                found[row, waits + place + index] = values[LOST_S] - lost_s if fits else np.inf
    return found
