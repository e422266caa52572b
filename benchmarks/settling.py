"""When a program that is followed has settled, so that its steps may be timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.follow.programs import Programs


def may_change(program: Program, programs: Programs) -> bool:
    """Return whether the step of a program may still be traced or planned again because of its first times."""
    return program.wants_trace or programs.predictions.may_correct(program)
