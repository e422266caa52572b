"""When everything happens, compiled: the second and the third pass of the simulation.

[Note: a stack of peaks]
Swap-ins are issued in the order in which they are needed. Number `k` may take its memory at moment `m` if at every
moment from `m` until its use `u` the memory needed there, what was issued before it and is not used yet, and its own
size fit into the budget. All numbers below `k` are issued by `m`, so what of them waits at moment `x` is the sum of
their sizes less those used by `x`, whenever they were issued. So the condition reads

    need[x] - used_by[x] <= budget - issued[k]        for all x from m to u - 1

with `issued` and `used_by` running sums of sizes that depend on the order alone. The last `x` that breaks it is
found by bisection in a stack of the positions whose left side is above everything to their right.

[Note: what is carried over]
A copy out over the end of the step may still be on its way when the step ends. Then it goes on in the following step,
which is the same step: that one begins with its memory taken until the copy has ended, which the second half of
`Work.out_end` says. A step that is repeated has to leave what it found. `is_settled` looks for that: `clock` has begun
with nothing carried, and begins again with what the step left. What is found is a schedule that a runtime can keep step
by step: where a step leaves less than it began with, the next one may treat the copies as if they had taken longer. If
the search does not end, compute waits at the end of the step until all copies out have ended, which can be kept as
well. So the time is never better than what the links carry.

Copies of gaps within the step have all ended by its end: their buffers were used again. So those that are carried over
follow one another from the start of the following step on, in their old order.
"""

from typing import Any

from torchdelta.simulate.arrays import (
    CUT,
    DISK,
    EXCESS,
    EXCESS_SUM,
    MOST_BYTES,
    NO_STALL,
    NUM_SWAPS,
    PEAK,
    PEAK_OP,
    REPLAY,
    STALL,
    SWAP,
    TIME,
    Codes,
    Static,
    Work,
)
from torchdelta.simulate.compiled import compiled_part
from torchdelta.simulate.copies import end_of_copy

__all__ = ["LAST_TURN", "clock", "is_settled", "issue_moments"]

LAST_TURN = 4
"""So many rounds look for a step that leaves what it finds; then compute waits at the end of the step."""

_ROUNDING = 1e-9
"""Times of two rounds that differ by such a share of the step are the same."""

_end = compiled_part(end_of_copy)


@compiled_part
def issue_moments(static: Static, work: Work, budget: Any, prefetch: bool) -> None:
    """Fill `swap_issue`: the first moment at which each swap-in may take its memory. See [Note: a stack of peaks]."""
    num_swaps = work.ints[NUM_SWAPS]
    swap_gap, swap_return, swap_issue = work.swap_gap, work.swap_return, work.swap_issue
    if not prefetch:
        for number in range(num_swaps):
            swap_issue[number] = swap_return[number]
        return
    need, size = work.need, static.size
    gap_buffer, gap_last, gap_next = static.gap_buffer, static.gap_last, static.gap_next
    # The stack: positions in `chain`, which no replay needs any more, their values in `total`, which the clock fills.
    position, height = work.chain, work.total
    depth = 0
    moment = 0
    used = 0
    num_used = 0
    issued = 0
    earliest = 0
    for number in range(num_swaps):
        gap = swap_gap[number]
        issued += size[gap_buffer[gap]]
        while moment < swap_return[number]:
            while num_used < num_swaps and swap_return[num_used] <= moment:
                used += size[gap_buffer[swap_gap[num_used]]]
                num_used += 1
            value = need[moment] - used
            while depth and height[position[depth - 1]] <= value:
                depth -= 1
            position[depth] = moment
            height[moment] = value
            depth += 1
            moment += 1
        limit = budget - issued
        low, high = 0, depth  # the first place in the stack whose value is within the limit
        while low < high:
            middle = (low + high) // 2
            if height[position[middle]] > limit:
                low = middle + 1
            else:
                high = middle
        if low:
            earliest = max(earliest, position[low - 1] + 1)
        if gap_next[gap] > gap_last[gap]:  # else it is away from the step before
            earliest = max(earliest, gap_last[gap] + 1)
        swap_issue[number] = min(earliest, swap_return[number])
        earliest = swap_issue[number]


@compiled_part
def clock(
    static: Static,
    work: Work,
    codes: Codes,
    budget: Any,
    synchronous: bool,
    most_excess: Any,
    most_s: Any,
    waits_at_end: bool,
) -> None:
    """Run the queues. Compute waits for memory that is still on its way out, and for content on its way in.

    Begins with what the second half of `out_end` says of copies of the step before. Ends early, with `CUT` set, once
    the budget is passed by more than `most_excess` in sum or the step surely takes longer than `most_s`.
    """
    rates, size, time_s = static.rates, static.size, static.time_s
    gap_buffer, gap_last = static.gap_buffer, static.gap_last
    gap_next, gap_by_next = static.gap_next, static.gap_by_next
    num_ops = time_s.shape[0]
    need, total_at, replay_s, op_start = work.need, work.total, work.replay_s, work.op_start
    swap_gap, swap_issue, swap_return = work.swap_gap, work.swap_issue, work.swap_return
    queue, disk_queue, leave_op, return_op = work.queue, work.disk_queue, work.leave_op, work.return_op
    out_start, out_end, in_start, in_end = work.out_start, work.out_end, work.in_start, work.in_end
    stall_in, stall_out = work.stall_in, work.stall_out
    num_gaps = codes.shape[0]
    num_swaps = work.ints[NUM_SWAPS]
    left_s = work.floats[NO_STALL]
    stalled_s, replayed_s = 0.0, 0.0
    excess, peak_op = 0, 0
    now = 0.0
    out_free, out_from = 0.0, 0.0  # until when, and since when, a direction is busy without a pause
    in_free, in_from = 0.0, 0.0
    share = rates[6]
    disk_free = 0.0
    leaving = 0  # next gap whose swap-out is queued
    low, high = 0, 0  # swap-outs to the host on their way: queue[low:high]
    disk_low, disk_high = 0, 0
    pending = 0
    issued = 0
    waiting = 0  # first swap-in that is not needed yet
    ahead = 0  # bytes issued ahead of their use
    peak = -1
    any_over = gap_by_next.shape[0] > num_gaps
    for index in range(num_gaps, gap_by_next.shape[0]):
        gap = gap_by_next[index]
        carried_s = out_end[num_gaps + gap]
        out_end[gap] = carried_s
        leave_op[gap] = num_ops  # unless its copy ends earlier or later
        if codes[gap] and carried_s > 0.0:
            leave_op[gap] = 2 * num_ops
            pending += size[gap_buffer[gap]]
            if codes[gap] == SWAP:
                out_free = carried_s
                queue[high] = gap
                high += 1
            else:
                disk_free = carried_s
                disk_queue[disk_high] = gap
                disk_high += 1
    num_carried, num_disk_carried = high, disk_high
    for op in range(num_ops):
        first = waiting
        while waiting < num_swaps and swap_return[waiting] == op:
            if waiting < issued:
                ahead -= size[gap_buffer[swap_gap[waiting]]]
            waiting += 1
        # What is wanted back before it has left: by the time that it arrives its old place is free, and counts once.
        wanted = 0
        for number in range(max(first, issued), waiting):
            if out_end[swap_gap[number]] > now:
                wanted += size[gap_buffer[swap_gap[number]]]
        # Memory: what has left by now, and then what has to be waited for. To wait for what is wanted frees nothing.
        while True:
            if low < high and (disk_low == disk_high or out_end[queue[low]] <= out_end[disk_queue[disk_low]]):
                gap = queue[low]
                from_disk = False
            elif disk_low < disk_high:
                gap = disk_queue[disk_low]
                from_disk = True
            else:
                break
            if out_end[gap] > now:
                if need[op] + ahead + pending - wanted <= budget or pending == wanted:
                    break
                stall_out[gap] += out_end[gap] - now
                stalled_s += out_end[gap] - now
                now = out_end[gap]
                wanted = 0
                for number in range(max(first, issued), waiting):
                    if out_end[swap_gap[number]] > now:
                        wanted += size[gap_buffer[swap_gap[number]]]
            pending -= size[gap_buffer[gap]]
            leave_op[gap] = op
            if any_over and (disk_low < num_disk_carried if from_disk else low < num_carried):
                leave_op[gap] = num_ops + op
            if from_disk:
                disk_low += 1
            else:
                low += 1
        total = need[op] + ahead + pending - wanted
        # Swap-ins: those that are needed now, and those that may go ahead.
        while issued < num_swaps:
            gap = swap_gap[issued]
            bytes_ = size[gap_buffer[gap]]
            if issued >= waiting:
                if swap_issue[issued] > op or out_end[gap] > now or op <= gap_last[gap] < gap_next[gap]:
                    break
                if total + bytes_ > budget:
                    break
                ahead += bytes_
                total += bytes_
            return_op[gap] = op
            if codes[gap] == SWAP:
                start = max(in_free, now, out_end[gap])
                end = start + rates[2] + bytes_ / rates[1]
                if share < 1.0:
                    end = _end(start, end - start, out_from, out_free, share)
                    in_from = in_from if start == in_free else start
                in_free = end
            else:
                start = max(disk_free, now, out_end[gap])
                end = start + rates[5] + bytes_ / rates[4]
                disk_free = end
            in_start[gap] = start
            in_end[gap] = end
            issued += 1
            if synchronous:
                stall_in[gap] += end - now
                stalled_s += end - now
                now = end
            else:
                now += bytes_ * rates[8] + rates[9]
        total_at[op] = total
        if total > peak:
            peak = total
            peak_op = op
        if total > budget:
            excess += min(total - budget, MOST_BYTES - excess)
            if excess > most_excess:
                work.ints[CUT] = 1
                break
        for number in range(first, waiting):
            gap = swap_gap[number]
            if in_end[gap] > now:
                stall_in[gap] += in_end[gap] - now
                stalled_s += in_end[gap] - now
                now = in_end[gap]
        op_start[op] = now
        now += replay_s[op] + time_s[op]
        left_s -= replay_s[op] + time_s[op]
        if now + left_s > most_s:
            work.ints[CUT] = 1
            break
        replayed_s += replay_s[op]
        while leaving < num_gaps and gap_last[leaving] <= op:
            code = codes[leaving]
            if code in (SWAP, DISK):
                bytes_ = size[gap_buffer[leaving]]
                if any_over and gap_next[leaving] <= gap_last[leaving]:
                    # It is back from the step before, so that copy has ended, and all before it.
                    while low < num_carried and out_end[queue[low]] <= now:
                        pending -= size[gap_buffer[queue[low]]]
                        leave_op[queue[low]] = num_ops + op + 1
                        low += 1
                    while disk_low < num_disk_carried and out_end[disk_queue[disk_low]] <= now:
                        pending -= size[gap_buffer[disk_queue[disk_low]]]
                        leave_op[disk_queue[disk_low]] = num_ops + op + 1
                        disk_low += 1
                else:
                    leave_op[leaving] = 2 * num_ops  # until its copy has ended
                if code == SWAP:
                    start = max(out_free, now)
                    end = start + rates[2] + bytes_ / rates[0]
                    if share < 1.0:
                        end = _end(start, end - start, in_from, in_free, share)
                        out_from = out_from if start == out_free else start
                    out_free = end
                    queue[high] = leaving
                    high += 1
                else:
                    start = max(disk_free, now)
                    end = start + rates[5] + bytes_ / rates[3]
                    disk_free = end
                    disk_queue[disk_high] = leaving
                    disk_high += 1
                out_start[leaving] = start
                out_end[leaving] = end
                pending += bytes_
                if synchronous:
                    stall_out[leaving] += end - now
                    stalled_s += end - now
                    now = end
                else:
                    now += bytes_ * rates[7] + rates[9]
            leaving += 1
    if waits_at_end:
        for index in range(num_gaps, gap_by_next.shape[0]):
            gap = gap_by_next[index]
            if codes[gap] and out_end[gap] > now:
                stall_out[gap] += out_end[gap] - now
                stalled_s += out_end[gap] - now
                now = out_end[gap]
    op_start[num_ops] = now
    work.floats[TIME], work.floats[STALL], work.floats[REPLAY] = now, stalled_s, replayed_s
    work.ints[PEAK], work.ints[PEAK_OP], work.ints[EXCESS_SUM] = peak, peak_op, excess
    work.ints[EXCESS] = max(0, peak - budget)


@compiled_part
def is_settled(static: Static, work: Work, codes: Codes, turn: int) -> bool:
    """Return whether `clock` left what it found; else have it begin with what it left, in the last turn with nothing.

    See [Note: what is carried over].
    """
    gap_by_next, out_end = static.gap_by_next, work.out_end
    num_gaps = codes.shape[0]
    settled = True
    end_s = work.floats[TIME]
    for index in range(num_gaps, gap_by_next.shape[0]):
        gap = gap_by_next[index]
        if codes[gap]:
            left_s, carried_s = max(out_end[gap] - end_s, 0.0), out_end[num_gaps + gap]
            settled = settled and left_s <= carried_s and (left_s > 0.0) == (carried_s > 0.0)
    if not settled:
        for index in range(num_gaps, gap_by_next.shape[0]):
            gap = gap_by_next[index]
            left_s = max(out_end[gap] - end_s, 0.0) if codes[gap] else 0.0
            out_end[num_gaps + gap] = left_s + _ROUNDING * end_s if left_s > 0.0 and turn < LAST_TURN else 0.0
    return settled
