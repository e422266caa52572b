"""Compares the times and peaks of followed steps with their predictions, and the times with earlier ones.

[Note: a wrong prediction]
A plan is made with the cost of copies that was measured before. In reactive steps, no kernel runs while a copy is
waited for, so such a copy slows nothing down. In followed steps kernels run beside copies, which also take memory
bandwidth, and no counter shows that. So if the steps of a program take much more or less time than predicted, the
difference is taken as the cost of its copies, and the step is planned again with that. Time outside of ops, such as
reading data, is in no plan: what the traced step spent so is added to the predictions that are shown, and taken off the
measured time before the two are compared. If copies cannot explain the difference, the op times of the trace must be
wrong, and the step is traced again.

If the peak of the steps whose times are compared first is more than 10 % above or below the predicted one, the sizes
in the trace must be wrong, and the step is traced again as well.

Only steps count that kept to the budget, and only once recording is reduced to what the program needs. If the new
program is slower, the earlier one is followed again. Its step is then never corrected again, and the cost of copies is
forgotten if it was learned from the steps of the earlier program.
"""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Final

from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.runtime.follow.measured_machine import MeasuredMachine
    from torchdelta.runtime.follow.program import Program, ProgramCache
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Predictions", "outside_s"]

_logger = logging.getLogger("torchdelta")
_NUM_TIMES: Final = 7  # step times of which a median is taken
_MISS: Final = 0.1  # a median time or a peak that is off by more than this share leads to a new plan
_MAX_CORRECTIONS: Final = 2  # of the plan of one step
_OUTSIDE_OP_S: Final = 2e-5  # an upper estimate of the script's own time for each op
_MOST_UNJUDGED: Final = 24  # after so many followed steps while nothing was planned, its time is not waited for


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

    def may_correct(self, program: Program) -> bool:
        """Return whether a program's time has still to be compared with its prediction."""
        return (
            program.answer.time_s > 0.0
            and not program.first_s
            and program.num_corrections < _MAX_CORRECTIONS
            and program.num_followed - program.num_disturbed <= _MOST_UNJUDGED
        )

    def is_wrong(self, program: Program, time_s: float, peak_bytes: int) -> bool:
        """Note what a step took that a program carried out. Return whether that step has to be planned again.

        If so, the caller asks for a plan from the program's trace, or has the step traced again if that is gone.
        """
        if program.wants_trace:
            return False  # it will be planned again anyway
        program.step_times_s.append(time_s)
        program.peak_bytes = max(program.peak_bytes, peak_bytes)
        if len(program.step_times_s) < _NUM_TIMES:
            return False
        median_s = statistics.median(program.step_times_s)
        program.step_times_s.clear()
        if program.wrong_s:
            program.wrong_s = median_s
        if not program.first_s:
            program.first_s = median_s
            return not self._has_restored(program, median_s) and self._is_missed(program, median_s)
        if abs(median_s / program.first_s - 1) <= _MISS or program.num_corrections >= _MAX_CORRECTIONS:
            return False
        earlier_ms = program.first_s * 1e3
        _logger.debug("steps take %.1f ms, earlier %.1f ms: tracing one again", median_s * 1e3, earlier_ms)
        program.num_corrections += 1
        program.wrong_s = 0.0  # times from here on are compared with none of the earlier ones
        program.step = None  # its op times are those of earlier steps
        return True

    def _is_missed(self, program: Program, median_s: float) -> bool:
        """Return whether a step has to be planned again because its time or peak is not what its program predicts."""
        predicted_s = program.answer.time_s  # 0.0 if the plan was given
        more_s = max(0.0, median_s - predicted_s - program.outside_s) or min(0.0, median_s - predicted_s)
        may = predicted_s > 0.0 and program.is_settled and program.num_corrections < _MAX_CORRECTIONS
        more_bytes = program.peak_bytes - program.predicted_peak_bytes
        if may and abs(more_bytes) > _MISS * program.predicted_peak_bytes:
            program.step = None
            _logger.debug(
                "steps peak at %s, predicted %s: planning again",
                format_bytes(program.peak_bytes),
                format_bytes(program.predicted_peak_bytes),
            )
            program.num_corrections += 1
            program.wrong_s = median_s
            return True
        if not may or abs(more_s) <= _MISS * median_s:
            return False
        program.has_taught = program.machine is not None and self._machine.learn(
            program.machine, more_s, program.swapped_bytes
        )
        if not program.has_taught:
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
        """Go back to the earlier program if its steps took less time. Return whether they did."""
        if not program.is_settled:
            return False
        earlier, program.replaces = program.replaces, None
        if earlier is None or median_s <= earlier.wrong_s:
            return False
        _logger.debug(
            "steps take %.1f ms, %.1f ms with the plan before: following that again",
            median_s * 1e3,
            earlier.wrong_s * 1e3,
        )
        earlier.num_corrections = _MAX_CORRECTIONS
        earlier.wants_trace = False
        earlier.forget_times()
        if earlier.has_taught:
            self._machine.forget()
        self._cache.remove(program)
        self._cache.add(earlier)
        return True
