"""The simulation itself, compiled: arrays in, arrays out. `docs/design/0008-the-simulator.md` states what it means.

Three passes, each linear in the ops but for one binary search a swap-in: `contents`, `issue_moments` and `clock`.

[Note: typed constants]
numba compiles a function anew for each constant that a compiled caller hands over as a literal, seconds each time. So
those are numpy's numbers, which have a type and no value.
"""

from typing import Any

import numpy as np

from torchdelta.simulate.arrays import (
    CUT,
    DISK_PEAK,
    EXCESS_SUM,
    HOST_PEAK,
    INVALID,
    STAMP,
    TIME,
    Codes,
    Ints,
    Static,
    Work,
)
from torchdelta.simulate.clock import LAST_TURN, clock, is_settled, issue_moments
from torchdelta.simulate.compiled import compiled, inlined
from torchdelta.simulate.contents import contents

__all__ = ["NO_CUT", "evaluate", "measure"]

NO_CUT: Any = np.int64(2**62)
"""No sum of bytes is more. See [Note: typed constants]."""

_PREFETCH: Any = np.bool_(True)
_SYNCHRONOUS: Any = np.bool_(False)
"""What a planner counts on."""


@compiled
def evaluate(
    s: Static,
    w: Work,
    codes: Codes,
    limits: Ints,
    prefetch: bool,
    synchronous: bool,
    most_excess: Any,
    most_s: Any,
) -> tuple[int, float]:
    """Simulate a step; all answers are in `w`.

    Returns excess and time, both at their worst where the codes are impossible or the evaluation was cut.

    Args:
        s: The problem.
        w: Room for it.
        codes: One a gap.
        limits: Most bytes on the device, on the host and on the disk.
        prefetch: See `Options`.
        synchronous: See `Options`.
        most_excess: Stop, with `CUT` set, once the excess is surely more than so many bytes in sum.
        most_s: Stop, with `CUT` set, once the step surely takes more than so many seconds.
    """
    w.ints[:STAMP] = 0
    w.floats[:] = 0.0
    w.absent[:] = 0
    w.stall_out[:] = 0.0
    w.stall_in[:] = 0.0
    num_gaps = codes.shape[0]
    any_over_end = s.gap_by_next.shape[0] > num_gaps
    if any_over_end:
        w.out_end[num_gaps:] = 0.0
    contents(s, w, codes, limits[0], most_excess)
    if not w.ints[CUT]:
        issue_moments(s, w, limits[0], prefetch)
        turn = 0
        while True:
            # Called from one place alone, so that the compiler puts it in here: handing over all arrays takes longer
            # than the queues of a small step.
            clock(s, w, codes, limits[0], synchronous, most_excess, most_s, turn == LAST_TURN)
            turn += 1
            if not any_over_end or w.ints[CUT] or turn > LAST_TURN or is_settled(s, w, codes, turn):
                break
            w.stall_out[:] = 0.0
            w.stall_in[:] = 0.0
    # Too much elsewhere weighs as if it lasted the whole step, so that a search sees it in the same sum.
    w.ints[EXCESS_SUM] += max(0, w.ints[HOST_PEAK] - limits[1]) * s.time_s.shape[0]
    w.ints[EXCESS_SUM] += max(0, w.ints[DISK_PEAK] - limits[2]) * s.time_s.shape[0]
    if w.ints[INVALID]:
        w.floats[TIME] = np.inf
    if w.ints[INVALID] or w.ints[CUT]:
        return NO_CUT, np.inf
    return w.ints[EXCESS_SUM], w.floats[TIME]


@inlined
def measure(s: Static, w: Work, codes: Codes, limits: Ints, most_excess: Any, most_s: Any) -> tuple[int, float]:
    """Return excess and time, as `evaluate` does, for a runtime like ours."""
    return evaluate(s, w, codes, limits, _PREFETCH, _SYNCHRONOUS, most_excess, most_s)
