"""When a program that is followed has settled, so that its steps may be timed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.follow.programs import Programs
    from torchdelta.trace.model import Trace

PLAN_WAIT_S = 300.0
# Followed steps until nothing new is learned: watched, followed, recorded for the outline, then in part and watched, in
# part, and on the native tape.
NUM_SETTLING_STEPS = 6
_MOST_SETTLING_STEPS = 24  # of one plan, until its time was compared with the prediction
_MOST_PLANS = 4  # of one step: two corrections, and the return to an earlier program


def may_change(program: Program, programs: Programs) -> bool:
    """Return whether the step of a program may still be traced or planned again because of its first times."""
    return program.wants_trace or programs.predictions.may_correct(program)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What `settle` ended with.

    Attributes:
        num_steps: How many steps it ran.
        program: The program that is followed from now on, if there is one. It is not planned again.
        trace: The trace that was planned last.
    """

    num_steps: int
    program: Program | None
    trace: Trace | None


def settle(programs: Programs, train: Callable[[], object]) -> Settled:
    """Run steps until no step is planned again."""
    num_steps, trace = 0, None
    for _ in range(_MOST_PLANS):
        program = _newest(programs)
        if program is not None and program.step is not None:
            trace = program.step[0]  # dropped when the program has held
        for _ in range(_MOST_SETTLING_STEPS):
            train()
            num_steps += 1
            if program is None or _is_settled(program, programs):
                break
        programs.wait(PLAN_WAIT_S)
        if _newest(programs) is program:
            break
    program = _newest(programs)
    if program is not None:
        program.num_corrections = sys.maxsize  # else the session counts the plain steps in between as its own time
    return Settled(num_steps=num_steps, program=program, trace=trace)


def _newest(programs: Programs) -> Program | None:
    """Return the program that was made, or taken up again, last."""
    return next(reversed(list(programs.cache)), None)


def _is_settled(program: Program, programs: Programs) -> bool:
    """Return whether later steps of a program will be like the latest one."""
    return program.num_followed >= NUM_SETTLING_STEPS and not may_change(program, programs)
