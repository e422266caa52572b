"""Compares the times of followed steps with their predictions and with earlier times.

[Note: a wrong prediction]
A plan is made for copies as they were before it was followed. Steps that react often wait for copies, which then take
little from kernels. Followed steps compute beside them, and copies also take memory bandwidth, which no counter shows.
So if followed steps take much more or less time than predicted, the difference is taken as what their copies take from
kernels, and the step is planned again with that. Time outside of ops, such as reading data, is in no prediction: it is
taken off first. If the program copies nothing, its op times must be wrong, and the step is traced again.

The new program may be slower all the same. Then the earlier one is followed again, and nothing more is corrected.
"""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdelta.runtime.follow.measured_machine import MeasuredMachine
    from torchdelta.runtime.follow.program import Program, ProgramCache
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Predictions", "outside_s"]

_logger = logging.getLogger("torchdelta")
_NUM_TIMES: Final = 7  # step times of which a median is taken
_MISS: Final = 0.1  # a median that is off by more than this share leads to a new plan
_MAX_CORRECTIONS: Final = 2  # of the plan of one step
_OUTSIDE_OP_S: Final = 2e-5  # what the program takes at most to call one more op


def outside_s(trace: Trace, log: StepLog) -> float:
    """Return about how many seconds of a step are outside of its ops."""
    return log.outside_s + len(trace.ops) * _OUTSIDE_OP_S


class Predictions:
    """Judges the times of followed steps. Mutable.

    Args:
        machine: Learns what copies take from kernels.
        cache: The programs that are followed.
    """

    def __init__(self, machine: MeasuredMachine, cache: ProgramCache) -> None:
        self._machine = machine
        self._cache = cache

    def is_wrong(self, program: Program, time_s: float) -> bool:
        """Note the time of a step that a program followed. Return whether that step has to be planned again.

        If so, the caller asks for a plan from the program's trace, or has the step traced again if that is gone.
        """
        program.step_times_s.append(time_s)
        if len(program.step_times_s) < _NUM_TIMES:
            return False
        median_s = statistics.median(program.step_times_s)
        program.step_times_s.clear()
        if not program.first_s:
            program.first_s = median_s
            return not self._has_restored(program, median_s) and self.is_wrong_by(program, median_s)
        is_drift = abs(median_s / program.first_s - 1) > _MISS and program.num_corrections < _MAX_CORRECTIONS
        if is_drift:
            earlier_ms = program.first_s * 1e3
            _logger.debug("steps take %.1f ms, earlier %.1f ms: tracing one again", median_s * 1e3, earlier_ms)
            program.num_corrections += 1
            program.step = None  # its op times are those of earlier steps
        return is_drift

    def is_wrong_by(self, program: Program, median_s: float) -> bool:
        """Return whether a program's step has to be planned again because its steps take this median time."""
        predicted_s = program.answer.time_s
        if not predicted_s:
            return False  # its plan was given
        more_s = max(0.0, median_s - predicted_s - program.outside_s) or min(0.0, median_s - predicted_s)
        if abs(more_s) <= _MISS * median_s or program.num_corrections >= _MAX_CORRECTIONS:
            return False
        if program.swapped_bytes and program.machine is not None:
            self._machine.learn(program.machine, more_s, program.swapped_bytes)
        else:
            program.step = None
        _logger.debug(
            "steps take %.1f ms, predicted %.1f ms and %.1f ms outside of ops: planning again",
            median_s * 1e3,
            predicted_s * 1e3,
            program.outside_s * 1e3,
        )
        program.num_corrections += 1
        program.wrong_s = median_s
        return True

    def _has_restored(self, program: Program, median_s: float) -> bool:
        """Follow the program before this one again if its steps took less time. Return whether they did."""
        earlier, program.replaces = program.replaces, None
        if earlier is None or median_s <= earlier.wrong_s:
            return False
        _logger.debug(
            "steps take %.1f ms, %.1f ms with the plan before: following that again",
            median_s * 1e3,
            earlier.wrong_s * 1e3,
        )
        earlier.step = None
        earlier.num_corrections = _MAX_CORRECTIONS
        earlier.forget_times()
        self._cache.add(earlier)
        return True
