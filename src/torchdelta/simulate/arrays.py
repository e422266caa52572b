"""The arrays that the compiled simulation reads and writes, and the numbers of their places."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_BYTES", "Codes", "Floats", "Ints", "Static", "Work", "new_work"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Codes = NDArray[np.int8]

KEEP, SWAP, DISK, RECOMPUTE, AGAIN = 0, 1, 2, 3, 4

# Places in `Work.ints` and `Work.floats`.
PEAK, PEAK_OP, EXCESS, EXCESS_SUM, HOST_PEAK, DISK_PEAK, NUM_SWAPS, NUM_REPLAYED, INVALID, CUT, STAMP = range(11)
TIME, STALL, REPLAY, NO_STALL = range(4)

MOST_BYTES: Any = np.int64(2**62)
"""Sums of bytes end here: what would be more is as much. See [Note: typed constants] in `kernel.py`."""


class Static(NamedTuple):
    """A trace and a machine as arrays. Buffers' reads and writes by op are in compressed rows: `*_ptr`, `*_ids`.

    Gaps over the end of the step (`gap_next` is then an op of the following step, and not after `gap_last`) have no
    arrays of their own but room at the end of others: each array that is handed from one compiled function to the next
    costs time in every evaluation.
    """

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
    birth: Ints  # of what a replay cannot make: -1, as if it were there before the step
    last: Ints  # last moment before which a replay finds the buffer
    previous: Ints  # version in the same storage that the birth of this one overwrote, or -1
    gap_buffer: Ints  # who leaves, by gap; then who comes back: over the end the storage's first version
    gap_last: Ints
    gap_next: Ints  # of a gap over the end: the op of the following step
    gap_by_next: Ints  # all gaps; then those over the end
    # Out, in, latency, disk write, disk read, disk latency, what a copy keeps beside one the other way, and what a byte
    # out and in takes of compute.
    rates: Floats


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
    out_end: Floats  # by gap; then, over the end, when the copy of the step before ends in this one: 0 if before
    in_start: Floats
    in_end: Floats
    stall_out: Floats
    stall_in: Floats
    op_start: Floats
    queue: Ints
    disk_queue: Ints


def new_work(num_ops: int, num_buffers: int, num_gaps: int, num_reads: int) -> Work:
    """Return room for evaluations of a problem of this size; `num_reads` are those of all ops."""

    def ints(size: int) -> Ints:
        return np.zeros(size, np.int64)

    def floats(size: int) -> Floats:
        return np.zeros(size, np.float64)

    return Work(
        ints=ints(11),
        floats=floats(4),
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
        stack=ints(num_reads + num_gaps + 1),
        last_use=ints(num_buffers),
        made_mark=ints(num_buffers),
        swap_gap=ints(num_gaps + 1),
        swap_return=ints(num_gaps + 1),
        swap_issue=ints(num_gaps + 1),
        leave_op=ints(num_gaps),
        return_op=ints(num_gaps),
        out_start=floats(num_gaps),
        out_end=floats(2 * num_gaps),
        in_start=floats(num_gaps),
        in_end=floats(num_gaps),
        stall_out=floats(num_gaps),
        stall_in=floats(num_gaps),
        op_start=floats(num_ops + 1),
        queue=ints(2 * num_gaps + 1),  # over the end of the step, what is on its way from the step before as well
        disk_queue=ints(2 * num_gaps + 1),
    )
