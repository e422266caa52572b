"""The simulation itself, compiled: arrays in, arrays out. `docs/design/0008-the-simulator.md` states what it means.

Three passes, each linear in the ops but for one binary search a swap-in:

1.  `_contents`: what is on the device at each moment. Walks the ops once, lets buffers leave and come back, and plays
    every replay with its transients. Its result does not depend on any time.
2.  `_issue_moments`: the first moment at which each swap-in may take its memory. See [Note: a stack of peaks].
3.  `_clock`: the queues. Compute waits for memory that is still on its way out, and for content on its way in.

[Note: a stack of peaks]
Swap-ins are issued in the order in which they are needed. Number `k` may take its memory at moment `m` if at every
moment from `m` until its use `u` the memory needed there, what was issued before it and is not used yet, and its own
size fit into the budget. All numbers below `k` are issued by `m`, so what of them waits at moment `x` is the sum of
their sizes less those used by `x`, whenever they were issued. So the condition reads

    need[x] - used_by[x] <= budget - issued[k]        for all x from m to u - 1

with `issued` and `used_by` running sums of sizes that depend on the order alone. The last `x` that breaks it is
found by bisection in a stack of the positions whose left side is above everything to their right.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["Static", "Work", "evaluate", "new_work"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Codes = NDArray[np.int8]

KEEP, SWAP, DISK, RECOMPUTE, AGAIN = 0, 1, 2, 3, 4

# Places in `Work.ints` and `Work.floats`.
PEAK, PEAK_OP, EXCESS, EXCESS_SUM, HOST_PEAK, DISK_PEAK, NUM_SWAPS, NUM_REPLAYED, INVALID, STAMP = range(10)
TIME, STALL, REPLAY = range(3)


class Static(NamedTuple):
    """A trace and a machine as arrays. Buffers' reads and writes by op are in compressed rows: `*_ptr`, `*_ids`."""

    time_s: Floats
    plain: Ints  # load and workspace at each op
    before: Ints  # what lives on both sides of the moment before each op: what a replay there finds
    workspace: Ints
    can_rerun: NDArray[np.bool_]
    read_ptr: Ints
    read_ids: Ints
    write_ptr: Ints
    write_ids: Ints
    size: Ints
    birth: Ints
    last: Ints  # last moment before which a replay finds the buffer
    previous: Ints  # version in the same storage that the birth of this one overwrote, or -1
    gap_buffer: Ints
    gap_last: Ints
    gap_next: Ints
    gap_by_next: Ints
    rates: Floats  # out, in, latency, disk write, disk read, disk latency


class Work(NamedTuple):
    """What an evaluation writes; reused by the next one."""

    ints: Ints
    floats: Floats
    absent: Codes
    absent_gap: Ints
    need: Ints
    total: Ints
    replay_s: Floats
    replay_end: Ints  # where each moment's replay ends in replay_ops
    replay_ops: Ints
    replay_peak: Ints
    op_mark: Ints
    chain: Ints
    stack: Ints
    last_use: Ints
    made_mark: Ints
    swap_gap: Ints
    swap_return: Ints
    swap_issue: Ints
    leave_op: Ints
    return_op: Ints
    out_start: Floats
    out_end: Floats
    in_start: Floats
    in_end: Floats
    stall_out: Floats
    stall_in: Floats
    op_start: Floats
    queue: Ints
    disk_queue: Ints


def new_work(num_ops: int, num_buffers: int, num_gaps: int) -> Work:
    """Return room for evaluations of a problem of this size."""

    def ints(size: int) -> Ints:
        return np.zeros(size, np.int64)

    def floats(size: int) -> Floats:
        return np.zeros(size, np.float64)

    return Work(
        ints=ints(10),
        floats=floats(3),
        absent=np.zeros(num_buffers, np.int8),
        absent_gap=ints(num_buffers),
        need=ints(num_ops),
        total=ints(num_ops),
        replay_s=floats(num_ops),
        replay_end=ints(num_ops + 1),
        replay_ops=ints(4 * num_ops + 16),
        replay_peak=ints(num_ops),
        op_mark=ints(num_ops),
        chain=ints(num_ops),
        stack=ints(num_ops + num_gaps + 1),
        last_use=ints(num_buffers),
        made_mark=ints(num_buffers),
        swap_gap=ints(num_gaps + 1),
        swap_return=ints(num_gaps + 1),
        swap_issue=ints(num_gaps + 1),
        leave_op=ints(num_gaps),
        return_op=ints(num_gaps),
        out_start=floats(num_gaps),
        out_end=floats(num_gaps),
        in_start=floats(num_gaps),
        in_end=floats(num_gaps),
        stall_out=floats(num_gaps),
        stall_in=floats(num_gaps),
        op_start=floats(num_ops + 1),
        queue=ints(num_gaps + 1),
        disk_queue=ints(num_gaps + 1),
    )


@njit(cache=True)
def _replay(s: Static, w: Work, op: Any, targets: Any, away: Any) -> Any:
    """Play the replay before an op and return the bytes that are away after it.

    `w.stack[:targets]` holds the buffers that it has to make.
    """
    w.ints[STAMP] += 1
    stamp = w.ints[STAMP]
    length = 0
    top = targets
    while top:
        top -= 1
        producer = s.birth[w.stack[top]]
        if producer < 0 or not s.can_rerun[producer]:
            w.ints[INVALID] = 1
            continue
        if w.op_mark[producer] == stamp:
            continue
        w.op_mark[producer] = stamp
        w.chain[length] = producer
        length += 1
        for place in range(s.read_ptr[producer], s.read_ptr[producer + 1]):
            read = s.read_ids[place]
            if s.birth[read] < op <= s.last[read]:
                code = w.absent[read]
                if code == KEEP:
                    continue
                if code <= DISK:
                    away -= s.size[read]
                    _come_back(w, read, op)
                    continue
            source = s.birth[read]
            # What is marked already need not be pushed: this keeps the stack within its room.
            if source < 0 or w.op_mark[source] != stamp:
                if top >= w.stack.shape[0]:
                    w.ints[INVALID] = 1
                    continue
                w.stack[top] = read
                top += 1
    chain = w.chain[:length]
    chain.sort()
    for step in range(length):
        producer = chain[step]
        for place in range(s.read_ptr[producer], s.read_ptr[producer + 1]):
            w.last_use[s.read_ids[place]] = producer
        for place in range(s.write_ptr[producer], s.write_ptr[producer + 1]):
            w.last_use[s.write_ids[place]] = -1
    held = 0
    peak = 0
    for step in range(length):
        producer = chain[step]
        for place in range(s.write_ptr[producer], s.write_ptr[producer + 1]):
            made = s.write_ids[place]
            old = s.previous[made]
            if old >= 0 and w.made_mark[old] == stamp:
                held -= s.size[old]  # overwritten in place
                w.made_mark[old] = 0
            code = w.absent[made]
            if code == RECOMPUTE or (code == AGAIN and s.gap_next[w.absent_gap[made]] == op):
                away -= s.size[made]
                w.absent[made] = KEEP
                w.return_op[w.absent_gap[made]] = op
            else:
                w.made_mark[made] = stamp
                held += s.size[made]
        peak = max(peak, s.before[op] - away + held + s.workspace[producer])
        for place in range(s.write_ptr[producer], s.write_ptr[producer + 1]):
            made = s.write_ids[place]
            if w.made_mark[made] == stamp and w.last_use[made] < 0:
                held -= s.size[made]
                w.made_mark[made] = 0
        for place in range(s.read_ptr[producer], s.read_ptr[producer + 1]):
            read = s.read_ids[place]
            if w.made_mark[read] == stamp and w.last_use[read] == producer:
                held -= s.size[read]
                w.made_mark[read] = 0
        w.replay_s[op] += s.time_s[producer]
        num = w.ints[NUM_REPLAYED]
        if num < w.replay_ops.shape[0]:
            w.replay_ops[num] = producer
        w.ints[NUM_REPLAYED] = num + 1
    w.replay_peak[op] = peak
    return away


@njit(cache=True)
def _come_back(w: Work, buffer: Any, op: int) -> None:
    """Note that a swapped buffer has to be there before an op."""
    num = w.ints[NUM_SWAPS]
    w.swap_gap[num] = w.absent_gap[buffer]
    w.swap_return[num] = op
    w.ints[NUM_SWAPS] = num + 1
    w.absent[buffer] = KEEP


@njit(cache=True)
def _contents(s: Static, w: Work, codes: Codes) -> None:
    """Fill `need`: the bytes at each moment, swap-ins ahead of their use and swap-outs on their way left out."""
    num_gaps = codes.shape[0]
    starting = 0
    ending = 0
    away = 0
    host = 0
    disk = 0
    for op in range(s.time_s.shape[0]):
        while starting < num_gaps and s.gap_last[starting] < op:
            code = codes[starting]
            if code:
                buffer = s.gap_buffer[starting]
                w.absent[buffer] = code
                w.absent_gap[buffer] = starting
                w.leave_op[starting] = op
                away += s.size[buffer]
                if code == SWAP:
                    host += s.size[buffer]
                elif code == DISK:
                    disk += s.size[buffer]
            starting += 1
        w.ints[HOST_PEAK] = max(w.ints[HOST_PEAK], host)
        w.ints[DISK_PEAK] = max(w.ints[DISK_PEAK], disk)
        first_back = w.ints[NUM_SWAPS]
        targets = 0
        while ending < num_gaps and s.gap_next[s.gap_by_next[ending]] == op:
            gap = s.gap_by_next[ending]
            ending += 1
            buffer = s.gap_buffer[gap]
            if codes[gap] == KEEP or w.absent[buffer] == KEEP or w.absent_gap[buffer] != gap:
                continue
            if codes[gap] <= DISK:
                away -= s.size[buffer]
                _come_back(w, buffer, op)
            else:
                w.stack[targets] = buffer
                targets += 1
        w.replay_s[op] = 0.0
        w.replay_peak[op] = 0
        if targets:
            away = _replay(s, w, op, targets, away)
        w.replay_end[op + 1] = w.ints[NUM_REPLAYED]
        w.need[op] = max(s.plain[op] - away, w.replay_peak[op])
        for number in range(first_back, w.ints[NUM_SWAPS]):
            gap = w.swap_gap[number]
            if codes[gap] == SWAP:
                host -= s.size[s.gap_buffer[gap]]
            else:
                disk -= s.size[s.gap_buffer[gap]]


@njit(cache=True)
def _issue_moments(s: Static, w: Work, budget: int, prefetch: bool) -> None:
    """Fill `swap_issue`. See [Note: a stack of peaks]."""
    num_swaps = w.ints[NUM_SWAPS]
    if not prefetch:
        w.swap_issue[:num_swaps] = w.swap_return[:num_swaps]
        return
    depth = 0
    moment = 0
    used = 0
    num_used = 0
    issued = 0
    earliest = 0
    # The stack: positions in `chain`, which no replay needs any more, their values in `total`, which the clock fills.
    for number in range(num_swaps):
        gap = w.swap_gap[number]
        issued += s.size[s.gap_buffer[gap]]
        while moment < w.swap_return[number]:
            while num_used < num_swaps and w.swap_return[num_used] <= moment:
                used += s.size[s.gap_buffer[w.swap_gap[num_used]]]
                num_used += 1
            value = w.need[moment] - used
            while depth and w.total[w.chain[depth - 1]] <= value:
                depth -= 1
            w.chain[depth] = moment
            w.total[moment] = value
            depth += 1
            moment += 1
        limit = budget - issued
        low, high = 0, depth  # the first place in the stack whose value is within the limit
        while low < high:
            middle = (low + high) // 2
            if w.total[w.chain[middle]] > limit:
                low = middle + 1
            else:
                high = middle
        if low:
            earliest = max(earliest, w.chain[low - 1] + 1)
        earliest = max(earliest, s.gap_last[gap] + 1)
        w.swap_issue[number] = min(earliest, w.swap_return[number])
        earliest = w.swap_issue[number]


@njit(cache=True)
def _clock(s: Static, w: Work, codes: Codes, budget: int, synchronous: bool) -> None:
    """Run the queues."""
    num_gaps = codes.shape[0]
    num_swaps = w.ints[NUM_SWAPS]
    now = 0.0
    out_free = 0.0
    in_free = 0.0
    disk_free = 0.0
    leaving = 0  # next gap whose swap-out is queued
    low, high = 0, 0  # swap-outs to the host on their way: w.queue[low:high]
    disk_low, disk_high = 0, 0
    pending = 0
    issued = 0
    waiting = 0  # first swap-in that is not needed yet
    ahead = 0  # bytes issued ahead of their use
    peak = -1
    for op in range(s.time_s.shape[0]):
        first = waiting
        while waiting < num_swaps and w.swap_return[waiting] == op:
            if waiting < issued:
                ahead -= s.size[s.gap_buffer[w.swap_gap[waiting]]]
            waiting += 1
        # Memory: what has left by now, and then what has to be waited for.
        while True:
            if low < high and (disk_low == disk_high or w.out_end[w.queue[low]] <= w.out_end[w.disk_queue[disk_low]]):
                gap = w.queue[low]
                from_disk = False
            elif disk_low < disk_high:
                gap = w.disk_queue[disk_low]
                from_disk = True
            else:
                break
            if w.out_end[gap] > now:
                if w.need[op] + ahead + pending <= budget:
                    break
                w.stall_out[gap] += w.out_end[gap] - now
                w.floats[STALL] += w.out_end[gap] - now
                now = w.out_end[gap]
            pending -= s.size[s.gap_buffer[gap]]
            w.leave_op[gap] = op
            if from_disk:
                disk_low += 1
            else:
                low += 1
        total = w.need[op] + ahead + pending
        for number in range(max(first, issued), waiting):
            # Wanted back before it has left: by the time that it arrives its old place is free, and counts only once.
            gap = w.swap_gap[number]
            if w.out_end[gap] > now:
                total -= s.size[s.gap_buffer[gap]]
        # Swap-ins: those that are needed now, and those that may go ahead.
        while issued < num_swaps:
            gap = w.swap_gap[issued]
            size = s.size[s.gap_buffer[gap]]
            if issued >= waiting:
                if w.swap_issue[issued] > op or w.out_end[gap] > now or s.gap_last[gap] >= op:
                    break
                if total + size > budget:
                    break
                ahead += size
                total += size
            w.return_op[gap] = op
            if codes[gap] == SWAP:
                start = max(in_free, now, w.out_end[gap])
                end = start + s.rates[2] + size / s.rates[1]
                in_free = end
            else:
                start = max(disk_free, now, w.out_end[gap])
                end = start + s.rates[5] + size / s.rates[4]
                disk_free = end
            w.in_start[gap] = start
            w.in_end[gap] = end
            issued += 1
            if synchronous:
                w.stall_in[gap] += end - now
                w.floats[STALL] += end - now
                now = end
        w.total[op] = total
        if total > peak:
            peak = total
            w.ints[PEAK_OP] = op
        if total > budget:
            w.ints[EXCESS_SUM] += total - budget
        for number in range(first, waiting):
            gap = w.swap_gap[number]
            if w.in_end[gap] > now:
                w.stall_in[gap] += w.in_end[gap] - now
                w.floats[STALL] += w.in_end[gap] - now
                now = w.in_end[gap]
        w.op_start[op] = now
        now += w.replay_s[op] + s.time_s[op]
        w.floats[REPLAY] += w.replay_s[op]
        while leaving < num_gaps and s.gap_last[leaving] <= op:
            code = codes[leaving]
            if code in (SWAP, DISK):
                size = s.size[s.gap_buffer[leaving]]
                if code == SWAP:
                    start = max(out_free, now)
                    end = start + s.rates[2] + size / s.rates[0]
                    out_free = end
                    w.queue[high] = leaving
                    high += 1
                else:
                    start = max(disk_free, now)
                    end = start + s.rates[5] + size / s.rates[3]
                    disk_free = end
                    w.disk_queue[disk_high] = leaving
                    disk_high += 1
                w.out_start[leaving] = start
                w.out_end[leaving] = end
                pending += size
                if synchronous:
                    w.stall_out[leaving] += end - now
                    w.floats[STALL] += end - now
                    now = end
            leaving += 1
    w.op_start[s.time_s.shape[0]] = now
    w.floats[TIME] = now
    w.ints[PEAK] = peak
    w.ints[EXCESS] = max(0, peak - budget)


@njit(cache=True)
def evaluate(s: Static, w: Work, codes: Codes, limits: Ints, prefetch: bool, synchronous: bool) -> None:
    """Simulate a step. The answers are in `w`.

    Args:
        s: The problem.
        w: Room for it.
        codes: One a gap.
        limits: Most bytes on the device, on the host and on the disk.
        prefetch: See `Options`.
        synchronous: See `Options`.
    """
    w.ints[:STAMP] = 0
    w.floats[:] = 0.0
    w.absent[:] = 0
    w.stall_out[:] = 0.0
    w.stall_in[:] = 0.0
    _contents(s, w, codes)
    _issue_moments(s, w, limits[0], prefetch)
    _clock(s, w, codes, limits[0], synchronous)
    # Too much elsewhere weighs as if it lasted the whole step, so that a search sees it in the same sum.
    w.ints[EXCESS_SUM] += max(0, w.ints[HOST_PEAK] - limits[1]) * s.time_s.shape[0]
    w.ints[EXCESS_SUM] += max(0, w.ints[DISK_PEAK] - limits[2]) * s.time_s.shape[0]
    if w.ints[INVALID]:
        w.floats[TIME] = np.inf
