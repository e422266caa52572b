"""What is on the device at each moment, compiled: the first pass of the simulation, which no time enters.

One function, and its arrays taken out of their tuples once: each access through a tuple, and each call that hands one
over, counts references, which took longer than the replays themselves.
"""

from typing import Any

from torchdelta.simulate.arrays import (
    AGAIN,
    CUT,
    DISK,
    DISK_PEAK,
    EXCESS_SUM,
    HOST_PEAK,
    INVALID,
    KEEP,
    MOST_BYTES,
    NO_STALL,
    NUM_REPLAYED,
    NUM_SWAPS,
    RECOMPUTE,
    STAMP,
    SWAP,
    Codes,
    Static,
    Work,
)
from torchdelta.simulate.compiled import compiled_part

__all__ = ["fill_need"]

_SHORT = 64
"""Chains of at most so many ops are sorted by insertion alone."""


@compiled_part
def fill_need(static: Static, work: Work, codes: Codes, budget: Any, most_excess: Any) -> None:
    """Fill `need`: the bytes at each moment, swap-ins ahead of their use and swap-outs on their way left out.

    Walks the ops once, lets buffers leave and come back, and plays every replay with its transients. Ends early, with
    `CUT` set, once these bytes pass the budget by more than `most_excess` in sum.
    """
    ints, absent, absent_gap, need, stack = work.ints, work.absent, work.absent_gap, work.need, work.stack
    swap_gap, swap_return, return_op, leave_op = work.swap_gap, work.swap_return, work.return_op, work.leave_op
    replay_s, replay_peak, replay_end, replay_ops = work.replay_s, work.replay_peak, work.replay_end, work.replay_ops
    op_mark, chain, last_use, made_mark = work.op_mark, work.chain, work.last_use, work.made_mark
    time_s, plain, before, workspace, size = static.time_s, static.plain, static.before, static.workspace, static.size
    birth, last, previous, can_rerun = static.birth, static.last, static.previous, static.can_rerun
    read_ptr, read_ids, write_ptr, write_ids = static.read_ptr, static.read_ids, static.write_ptr, static.write_ids
    gap_buffer, gap_last = static.gap_buffer, static.gap_last
    gap_next, gap_by_next = static.gap_next, static.gap_by_next
    num_gaps = codes.shape[0]
    starting, ending = 0, 0
    num_swaps, num_replayed = 0, 0
    away, host, disk = 0, 0, 0
    host_peak, disk_peak = 0, 0
    excess = 0
    stamp = ints[STAMP]
    busy_s = 0.0
    for index in range(num_gaps, gap_by_next.shape[0]):
        gap = gap_by_next[index]
        code = codes[gap]
        if code:
            buffer = gap_buffer[num_gaps + gap]
            absent[buffer] = code
            absent_gap[buffer] = gap
            away += size[buffer]
            if code == SWAP:
                host += size[buffer]
            elif code == DISK:
                disk += size[buffer]
    for op in range(time_s.shape[0]):
        while starting < num_gaps and gap_last[starting] < op:
            code = codes[starting]
            if code:
                buffer = gap_buffer[starting]
                absent[buffer] = code
                absent_gap[buffer] = starting
                leave_op[starting] = op
                away += size[buffer]
                if code == SWAP:
                    host += size[buffer]
                elif code == DISK:
                    disk += size[buffer]
            starting += 1
        host_peak = max(host_peak, host)
        disk_peak = max(disk_peak, disk)
        first_back = num_swaps
        targets = 0
        while ending < num_gaps and gap_next[gap_by_next[ending]] == op:
            gap = gap_by_next[ending]
            ending += 1
            buffer = gap_buffer[num_gaps + gap]
            code = codes[gap]
            if code == KEEP or absent[buffer] == KEEP or absent_gap[buffer] != gap:
                continue
            if code <= DISK:
                away -= size[buffer]
                swap_gap[num_swaps] = gap
                swap_return[num_swaps] = op
                num_swaps += 1
                absent[buffer] = KEEP
            else:
                stack[targets] = buffer
                targets += 1
        replay_s[op] = 0.0
        replay_peak[op] = 0
        if targets:
            # The replay: first the ops that it has to run, by walking up from the buffers that it has to make.
            stamp += 1
            length = 0
            top = targets
            while top:
                top -= 1
                producer = birth[stack[top]]
                if producer < 0 or not can_rerun[producer]:
                    ints[INVALID] = 1
                    continue
                if op_mark[producer] == stamp:
                    continue
                op_mark[producer] = stamp
                chain[length] = producer
                length += 1
                for place in range(read_ptr[producer], read_ptr[producer + 1]):
                    read = read_ids[place]
                    if birth[read] < op <= last[read]:
                        code = absent[read]
                        if code == KEEP:
                            continue
                        if code <= DISK:
                            if gap_next[absent_gap[read]] <= gap_last[absent_gap[read]]:
                                ints[INVALID] = 1  # away over the end: it cannot be back before the step ends
                                continue
                            away -= size[read]
                            swap_gap[num_swaps] = absent_gap[read]
                            swap_return[num_swaps] = op
                            num_swaps += 1
                            absent[read] = KEEP
                            continue
                    source = birth[read]
                    if source < 0 or op_mark[source] != stamp:
                        stack[top] = read  # there is room for all reads of all ops
                        top += 1
            # Their old order. Most chains are a few ops, latest first, for which a sort by insertion is the fastest;
            # long ones are sorted with gaps before (Shell's sort: numpy's takes a second to compile).
            for end in range(length // 2):
                chain[end], chain[length - 1 - end] = chain[length - 1 - end], chain[end]
            distance = 1
            while distance * _SHORT < length:
                distance = 3 * distance + 1
            while distance:
                for step in range(distance, length):
                    later = chain[step]
                    place = step
                    while place >= distance and chain[place - distance] > later:
                        chain[place] = chain[place - distance]
                        place -= distance
                    chain[place] = later
                distance //= 3
            for step in range(length):
                producer = chain[step]
                for place in range(read_ptr[producer], read_ptr[producer + 1]):
                    last_use[read_ids[place]] = producer
                for place in range(write_ptr[producer], write_ptr[producer + 1]):
                    last_use[write_ids[place]] = -1
            held = 0
            peak = 0
            for step in range(length):
                producer = chain[step]
                for place in range(write_ptr[producer], write_ptr[producer + 1]):
                    made = write_ids[place]
                    old = previous[made]
                    if old >= 0 and made_mark[old] == stamp:
                        held -= size[old]  # overwritten in place
                        made_mark[old] = 0
                    code = absent[made]
                    if code == RECOMPUTE or (code == AGAIN and gap_next[absent_gap[made]] == op):
                        away -= size[made]
                        absent[made] = KEEP
                        return_op[absent_gap[made]] = op
                    else:
                        made_mark[made] = stamp
                        held += size[made]
                peak = max(peak, before[op] - away + held + workspace[producer])
                for place in range(write_ptr[producer], write_ptr[producer + 1]):
                    made = write_ids[place]
                    if made_mark[made] != stamp:
                        continue
                    # What is there already is read where it is: the second one of it goes at once.
                    if last_use[made] < 0 or (absent[made] == KEEP and op <= last[made]):
                        held -= size[made]
                        made_mark[made] = 0
                for place in range(read_ptr[producer], read_ptr[producer + 1]):
                    read = read_ids[place]
                    if made_mark[read] == stamp and last_use[read] == producer:
                        held -= size[read]
                        made_mark[read] = 0
                replay_s[op] += time_s[producer] + static.rates[10]
                if num_replayed < replay_ops.shape[0]:
                    replay_ops[num_replayed] = producer
                num_replayed += 1
            replay_peak[op] = peak
        replay_end[op + 1] = num_replayed
        need[op] = max(plain[op] - away, replay_peak[op])
        busy_s += time_s[op] + replay_s[op]
        if need[op] > budget:
            excess += min(need[op] - budget, MOST_BYTES - excess)
            if excess > most_excess:
                ints[CUT] = 1
                ints[EXCESS_SUM] = excess
                break
        for number in range(first_back, num_swaps):
            gap = swap_gap[number]
            if codes[gap] == SWAP:
                host -= size[gap_buffer[gap]]
            else:
                disk -= size[gap_buffer[gap]]
    ints[STAMP] = stamp
    ints[NUM_SWAPS], ints[NUM_REPLAYED] = num_swaps, num_replayed
    ints[HOST_PEAK], ints[DISK_PEAK] = host_peak, disk_peak
    work.floats[NO_STALL] = busy_s
