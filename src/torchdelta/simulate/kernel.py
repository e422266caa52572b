"""The simulation itself, compiled: arrays in, arrays out. `docs/design/0008-the-simulator.md` states what it means.

Three passes, each linear in the ops but for one binary search a swap-in: `fill_need`, `issue_moments` and `clock`.

[Note: typed constants]
numba compiles a function anew for each constant that a compiled caller hands over as a literal, seconds each time. So
those are numpy's numbers, which have a type and no value.
"""

from typing import Any

import numpy as np

from torchdelta.simulate.apart import SharedCode
from torchdelta.simulate.arrays import (
    CUT,
    DISK_PEAK,
    EXCESS_SUM,
    HOST_PEAK,
    INVALID,
    MOST_BYTES,
    STAMP,
    TIME,
    Codes,
    Ints,
    Static,
    Work,
)
from torchdelta.simulate.clock import LAST_TURN, clock, is_settled, issue_moments
from torchdelta.simulate.compiled import compiled, compiled_part
from torchdelta.simulate.memory_need import fill_need

__all__ = ["NO_CUT", "evaluate", "locate", "measure"]

NO_CUT: Any = MOST_BYTES
"""No sum of bytes is more, so nothing is cut."""

_PREFETCH: Any = np.bool_(True)
_SYNCHRONOUS: Any = np.bool_(False)
"""What a planner counts on."""


@compiled
def evaluate(
    static: Static,
    work: Work,
    codes: Codes,
    limits: Ints,
    prefetch: bool,
    synchronous: bool,
    most_excess: Any,
    most_s: Any,
) -> None:
    """Simulate a step. The results are in `work`.

    Args:
        static: The arrays of the problem.
        work: The arrays that an evaluation writes.
        codes: One a gap.
        limits: Most bytes on the device, on the host and on the disk.
        prefetch: See `Options`.
        synchronous: See `Options`.
        most_excess: Stop, with `CUT` set, once the excess is surely more than so many bytes in sum.
        most_s: Stop, with `CUT` set, once the step surely takes more than so many seconds.
    """
    work.ints[:STAMP] = 0
    work.floats[:] = 0.0
    work.absent[:] = 0
    work.stall_out[:] = 0.0
    work.stall_in[:] = 0.0
    num_gaps = codes.shape[0]
    any_over_end = static.gap_by_next.shape[0] > num_gaps
    if any_over_end:
        work.out_end[num_gaps:] = 0.0
    fill_need(static, work, codes, limits[0], most_excess)
    if not work.ints[CUT]:
        issue_moments(static, work, limits[0], prefetch)
        turn = 0
        while True:
            # Called from one place alone, so that the compiler puts it in here: handing over all arrays takes longer
            # than the queues of a small step.
            clock(static, work, codes, limits[0], synchronous, most_excess, most_s, turn == LAST_TURN)
            turn += 1
            if not any_over_end or work.ints[CUT] or turn > LAST_TURN or is_settled(static, work, codes, turn):
                break
            work.stall_out[:] = 0.0
            work.stall_in[:] = 0.0
    # Too much elsewhere weighs as if it lasted the whole step, so that a search sees it in the same sum.
    num_ops = static.time_s.shape[0]
    for peak, limit in ((HOST_PEAK, limits[1]), (DISK_PEAK, limits[2])):
        over = min(max(0, work.ints[peak] - limit), MOST_BYTES // num_ops) * num_ops
        work.ints[EXCESS_SUM] += min(over, MOST_BYTES - work.ints[EXCESS_SUM])
    if work.ints[INVALID]:
        work.floats[TIME] = np.inf


_shared = SharedCode(evaluate)
_evaluate = _shared.call


def locate(static: Static, work: Work, codes: Codes, limits: Ints) -> None:
    """Make `measure` callable: compile the simulation for arrays like these, or load it, once per process."""
    _shared.locate((static, work, codes, limits, True, False, NO_CUT, np.inf))


@compiled_part
def measure(static: Static, work: Work, codes: Codes, limits: Ints, most_excess: Any, most_s: Any) -> tuple[int, float]:
    """Return excess and time; both at their worst where the codes are impossible or the evaluation was cut."""
    _evaluate(static, work, codes, limits, _PREFETCH, _SYNCHRONOUS, most_excess, most_s)
    if work.ints[INVALID] or work.ints[CUT]:
        return NO_CUT, np.inf
    return work.ints[EXCESS_SUM], work.floats[TIME]
