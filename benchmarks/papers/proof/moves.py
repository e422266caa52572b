"""The decisions that lead from one state to the next, compiled: who stays, is swapped or dropped, and who is held."""

from typing import Any

import numpy as np
from numba import njit

from benchmarks.papers.proof.dominance import best_of
from benchmarks.papers.proof.states import (
    HELD,
    HELD_BYTES,
    HELD_S,
    HELD_SWAP,
    IN_S,
    KEPT,
    KEPT_BYTES,
    LEAVING,
    LOST_S,
    NUM_IN,
    PULLED,
    QUEUE,
    STAYING,
    STAYING_BYTES,
    WORD,
    Nest,
    States,
    enqueue,
    has,
    pass_time,
    put,
    run_backward,
    run_forward,
    take,
)

__all__ = ["advance"]

_KEEP, _SWAP, _SWAP_EARLY, _DROP_EARLY, _DROP = range(5)
"""What may become of a candidate. Early: it is back before its own next use, for a replay."""

_ORDERS = np.array([1, 1, 2, 6, 24], np.int64)
"""In how many orders so many copies might arrive; of more than four only four are looked at."""

_NO_ENDING = np.zeros(1, np.int64)


@njit(cache=True)
def _is_wanted(nest: Any, mask: Any, position: Any, decided: Any) -> bool:
    """Tell whether somebody may still be made from who is held: somebody who is not decided, or is held as well."""
    for index in range(nest.children[position], nest.children[position + 1]):
        child = nest.child[index]
        if child >= decided or has(mask, HELD, child):
            return True
    return False


@njit(cache=True)
def _are_there(nest: Any, mask: Any, position: Any, later: bool) -> bool:
    """Tell whether the decided parents of a replay are kept or held; with `later`, used at a later op suffices not."""
    for index in range(nest.parents[position], nest.parents[position + 1]):
        parent = nest.parent[index]
        if (
            parent < position
            and not (has(mask, KEPT, parent) or has(mask, HELD, parent))
            and (later or nest.next_op[parent] > nest.next_op[position])
        ):
            return False
    return True


@njit(cache=True)
def _forget(nest: Any, mask: Any, decided: Any) -> None:
    """Take from the kept ones those from which nobody will be made."""
    if mask[KEPT] == 0 and mask[KEPT + 1] == 0:
        return
    for position in range(decided):
        if has(mask, KEPT, position) and not _is_wanted(nest, mask, position, decided):
            take(mask, KEPT, position)


@njit(cache=True)
def _endings(nest: Any, mask: Any, position: Any, held: Any) -> Any:
    """Return every way in which a replay of this candidate may end what others are held for, a number each.

    Bits from the fifth on: who stays held; the lowest five: the order in which copies arrive. Who does not stay is
    what this one is made from, at some remove. Who stays and was dropped, of that what it was made from stays or is
    kept; and somebody is still made from it.
    """
    count = held.shape[0]
    makers = np.zeros(count, np.int64)
    makes = np.zeros(count, np.int64)
    is_open = np.zeros(count, np.bool_)
    for place in range(count):
        other = held[place]
        for index in range(nest.children[other], nest.children[other + 1]):
            child = nest.child[index]
            is_open[place] |= child > position
            for maker in range(count):
                if held[maker] == child:
                    makes[place] |= np.int64(1) << maker
        if has(mask, HELD_SWAP, other):
            continue
        for index in range(nest.parents[other], nest.parents[other + 1]):
            parent = nest.parent[index]
            if parent < position and not has(mask, KEPT, parent):
                for maker in range(count):
                    if held[maker] == parent:
                        makers[place] |= np.int64(1) << maker
    num_swapped = 0
    for place in range(count):
        num_swapped += has(mask, HELD_SWAP, held[place])
    most = _ORDERS.shape[0] - 1
    found = np.empty(_ORDERS[min(num_swapped, most)] << count, np.int64)
    number = 0
    for stays in range(1 << count):
        fits = True
        num_back = 0
        for place in range(count):
            if (stays >> place) & 1:
                if makers[place] & ~stays or not (is_open[place] or makes[place] & stays):
                    fits = False
                    break
            elif not (nest.ancestors[position, held[place] // WORD] >> (held[place] % WORD)) & 1:
                fits = False
                break
            elif has(mask, HELD_SWAP, held[place]):
                num_back += 1
        if fits:
            for order in range(_ORDERS[min(num_back, most)]):
                found[number] = stays * 32 + order
                number += 1
    return found[:number]


@njit(cache=True)
def _end_holding(nest: Any, mask: Any, floats: Any, queue: Any, position: Any, held: Any, stays: Any) -> None:
    """Let a replay make this candidate, and with it those that were held and of whom no bit of `stays` is set."""
    replay_s, help_s = nest.replay_s[position], nest.help_s[position]
    for place in range(held.shape[0]):
        other = held[place]
        if (stays >> place) & 1:
            continue
        take(mask, HELD, other)
        floats[HELD_BYTES] -= nest.size_bytes[other]
        if has(mask, HELD_SWAP, other):
            take(mask, HELD_SWAP, other)
        else:
            replay_s += nest.replay_s[other]
            help_s += nest.help_s[other]
            floats[HELD_S] -= nest.replay_s[other]
    floats[LOST_S] += replay_s
    queue[NUM_IN], floats[IN_S] = pass_time(queue, QUEUE, queue[NUM_IN], floats[IN_S], help_s, nest.in_s)


@njit(cache=True)
def _bring_back(nest: Any, before: Any, floats: Any, queue: Any, held: Any, stays: Any, order: Any) -> Any:
    """Queue the copies back of those whom `_end_holding` has let go, of more than four only four: return how many."""
    back = np.empty(_ORDERS.shape[0] - 1, np.int64)
    number = 0
    for place in range(held.shape[0]):
        if number < back.shape[0] and not (stays >> place) & 1 and has(before, HELD_SWAP, held[place]):
            back[number] = held[place]
            number += 1
    total = number
    for left in range(number, 0, -1):
        chosen = order % left
        order //= left
        enqueue(nest, floats, queue, back[chosen], False)
        for place in range(chosen, left - 1):
            back[place] = back[place + 1]
    return total


@njit(cache=True)
def _held_ones(mask: Any, floats: Any, decided: Any) -> Any:
    held = np.empty(decided, np.int64)
    number = 0
    if floats[HELD_BYTES] > 0.0:
        for position in range(decided):
            if has(mask, HELD, position):
                held[number] = position
                number += 1
    return held[:number]


@njit(cache=True)
def _must_be_there(nest: Any, mask: Any, position: Any) -> bool:
    """Tell whether a dropped child is there already: it was made from this one."""
    for index in range(nest.children[position], nest.children[position + 1]):
        child = nest.child[index]
        if child < position and has(mask, HELD, child) and not has(mask, HELD_SWAP, child):
            return True
    return False


@njit(cache=True)
def _are_wanted(nest: Any, mask: Any, held: Any, position: Any) -> bool:
    for place in range(held.shape[0]):
        if has(mask, HELD, held[place]) and not _is_wanted(nest, mask, held[place], position + 1):
            return False
    return not has(mask, HELD, position) or _is_wanted(nest, mask, position, position + 1)


@njit(cache=True)
def _decide(nest: Any, mask: Any, floats: Any, queue: Any, position: Any, choice: Any) -> None:
    """Keep a candidate, or let it leave; the replay that ends what others are held for is `_end_holding`."""
    size = nest.size_bytes[position]
    if choice == _KEEP:
        floats[KEPT_BYTES] += size
        floats[STAYING_BYTES] += size
        put(mask, KEPT, position)
        put(mask, STAYING, position)
    elif choice <= _SWAP_EARLY:
        put(mask, LEAVING, position)
    if choice == _SWAP:
        enqueue(nest, floats, queue, position, False)
    elif choice in (_SWAP_EARLY, _DROP_EARLY):
        put(mask, HELD, position)
        floats[HELD_BYTES] += size
        if choice == _SWAP_EARLY:
            put(mask, HELD_SWAP, position)
        else:
            floats[HELD_S] += nest.replay_s[position]


@njit(cache=True)
def _decide_all(nest: Any, states: Any, position: Any, most_s: Any, first: Any, out: Any, number: Any) -> Any:
    """Decide one candidate in the states from row `first` on, every way, into `out` from row `number` on.

    Return before which state it ended, for want of room if it is not the last one, and how many are in `out`.
    """
    masks, floats, queues = states
    back_from = nest.time_s.shape[0] - 1 if position == 0 else nest.next_op[position - 1] - 1
    back_to = nest.next_op[position] - 1
    ahead_from = 0 if position == 0 else nest.forward_end[position - 1]
    has_next = position + 1 < nest.next_op.shape[0] and nest.next_op[position + 1] == nest.next_op[position]
    mask, values, queue = masks[0].copy(), floats[0].copy(), queues[0].copy()
    for row in range(first, masks.shape[0]):
        mask[:], values[:], queue[:] = masks[row], floats[row], queues[row]
        if not run_backward(nest, values, queue, back_from, back_to) or values[LOST_S] > most_s:
            continue
        must = _must_be_there(nest, mask, position)
        held = _held_ones(mask, values, position)
        drops = not must and nest.can_replay[position] and _are_there(nest, mask, position, False)
        endings = _endings(nest, mask, position, held) if drops else _NO_ENDING
        if number + 2 * (_DROP + endings.shape[0]) > out[0].shape[0]:
            return row, number
        # Two copies back for the same op may come in either order: the one before is taken out and queued again.
        last = QUEUE + queue[NUM_IN] - 1
        is_second = position > 0 and back_from == back_to
        is_pair = is_second and queue[NUM_IN] > 0 and queue[last] == position - 1
        had_pulled = is_second and mask[PULLED]
        mask[PULLED] = had_pulled and has_next
        for choice in range(_DROP + 1):
            if (choice == _SWAP and must) or (choice == _DROP and not drops):
                continue
            if choice == _DROP_EARLY and not (nest.can_replay[position] and _are_there(nest, mask, position, True)):
                continue
            num_ways = endings.shape[0] if choice == _DROP else 1
            for way in range(2 * num_ways if is_pair and choice in (_SWAP, _DROP) else num_ways):
                new_mask, new_values, new_queue = out[0][number], out[1][number], out[2][number]
                new_mask[:], new_values[:], new_queue[:] = mask, values, queue
                if way >= num_ways:
                    new_queue[NUM_IN] -= 1
                    new_values[IN_S] = max(new_values[IN_S] - nest.in_s[position - 1], 0.0)
                if choice == _DROP:
                    ending = endings[way % num_ways]
                    _end_holding(nest, new_mask, new_values, new_queue, position, held, ending >> 5)
                    # Which of two replays for one op has its copies first is left open: the second one's are free.
                    if not had_pulled:
                        pulled = _bring_back(nest, mask, new_values, new_queue, held, ending >> 5, ending & 31)
                        new_mask[PULLED] = has_next and pulled > 0
                else:
                    _decide(nest, new_mask, new_values, new_queue, position, choice)
                    if not _are_wanted(nest, new_mask, held, position):
                        continue
                if way >= num_ways:
                    enqueue(nest, new_values, new_queue, position - 1, False)
                if not run_forward(nest, new_mask, new_values, new_queue, ahead_from, nest.forward_end[position]):
                    continue
                if new_values[LOST_S] + new_values[HELD_S] > most_s:
                    continue
                _forget(nest, new_mask, position + 1)
                number += 1
    return masks.shape[0], number


def advance(nest: Nest, states: States, position: int, most_s: float, slack_s: float) -> States:
    """Decide one candidate, every way.

    Args:
        nest: The step.
        states: Those in which all before it are decided.
        position: The candidate.
        most_s: States that lose more are left out.
        slack_s: Copies that end so much later, and losses that are a fifth of it more, are taken for the same.

    Returns:
        The states after, without those that another one makes needless.
    """
    row, number, count = 0, 0, len(states[0])
    out: States = _room(states, 4 * count + 64)
    while row < count:
        row, number = _decide_all(nest, states, position, most_s, row, out, number)
        if row < count:
            more = _room(states, 2 * len(out[0]))
            for new, old in zip(more, out, strict=True):
                new[:number] = old[:number]
            out = more
    return best_of(nest, out, number, slack_s)


def _room(states: States, height: int) -> States:
    masks, floats, queues = states
    return (
        np.empty((height, masks.shape[1]), masks.dtype),
        np.empty((height, floats.shape[1]), floats.dtype),
        np.empty((height, queues.shape[1]), queues.dtype),
    )
