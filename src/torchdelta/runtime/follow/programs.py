"""Gets a program for the traced step from the planner, and another one if it does not hold the budget.

The planner's inputs are measured: op times and bytes are those of the trace, links run as the tier's transfers did. It
is asked for less than the budget: what no trace shows (memory outside of known storages) and half a percent are left
out, and more where a program that was carried out needed room beyond its own.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from torchdelta.errors import PlanError, TierError, TraceFileError
from torchdelta.machine.model import Machine
from torchdelta.notices import warn_once
from torchdelta.runtime.follow.planning import Planning
from torchdelta.runtime.follow.schedule import make_schedule
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.plan.request import Answer
    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Programs"]

_logger = logging.getLogger("torchdelta")
_MARGIN_SHARE: Final = 0.005
_LARGER_MARGIN_SHARE: Final = 0.01  # added when a program did not hold
_MAX_TRACES: Final = 3
_MAX_PLANS: Final = 4
_MISSES_ALLOWED: Final = 1  # in the first followed steps copies out may be slower than they were measured


class Programs:
    """The programs of one session. Mutable.

    Args:
        config: Names the planner; None is never to plan.
        follower: Carries the program out.
        budget_bytes: The budget.
    """

    def __init__(self, config: Config, follower: Follower, budget_bytes: int) -> None:
        self.follower = follower
        self.budget_bytes = budget_bytes
        self.planning = Planning(config) if config.planner is not None else None
        if self.planning is not None and find_spec("numba") is None:
            self._end("numba is not installed: pip install 'torchdelta[plan]'")
        self.latest_answer: Answer | None = None  # what the latest plan is predicted to cost; for measurements
        self.unseen_bytes = 0  # live outside of known storages when the step was traced: no plan contains them
        self._step: tuple[Trace, StepLog] | None = None
        self._margin_bytes = 0
        self._num_traces = 0
        self._num_plans = 0
        self._num_misses = 0
        self._num_unplanned = 0

    @property
    def wants_trace(self) -> bool:
        """Whether the next step is to be traced: buffers have had to leave, and no step was traced to its end yet."""
        return (
            self.planning is not None
            and self._step is None
            and self._num_traces < _MAX_TRACES
            and self.follower.room.counters.num_evictions > 0
        )

    def on_trace_begin(self) -> None:
        """Count a step that is being traced: its trace may be dropped."""
        self._num_traces += 1

    def on_traced(self, trace: Trace, log: StepLog) -> None:
        """Ask for a program of a step that was traced to its end."""
        self._step = trace, log
        why = log.why_not_followed()
        if why:
            warn_once(f"no plan is followed: {why}; buffers leave and return reactively")
            return
        usage = self.follower.room.usage
        usage.ask_counter(fresh=True)
        self.unseen_bytes = max(0, usage.unseen_bytes)
        self._margin_bytes = self.unseen_bytes + int(self.budget_bytes * _MARGIN_SHARE)
        self._ask()

    def on_step_end(self, peak_bytes: int) -> None:
        """Take a program that is ready, and judge the one that has been carried out."""
        counters = self.follower.room.counters
        num_unplanned, self._num_unplanned = counters.num_unplanned - self._num_unplanned, counters.num_unplanned
        held = not num_unplanned and peak_bytes <= self.budget_bytes
        if self.follower.was_followed or num_unplanned:
            self.follower.has_held = held
        if (self.follower.was_followed or num_unplanned) and not held:
            self._num_misses += 1
            if self._num_misses == _MISSES_ALLOWED + 1:
                over_bytes = max(0, peak_bytes - self.budget_bytes)
                self._margin_bytes += over_bytes + int(self.budget_bytes * _LARGER_MARGIN_SHARE)
                self._ask()
        if self.planning is not None and len(self.planning):
            self._take(self.planning)

    def _ask(self) -> None:
        if self._step is None or self.planning is None or self._num_plans >= _MAX_PLANS:
            return
        self._num_plans += 1
        try:
            self.planning.ask(None, self._step[0], self._machine(), self.budget_bytes - self._margin_bytes)
        except (OSError, TierError, TraceFileError) as error:
            self._end(str(error))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the program that was asked for. Return whether there is one. For tests and measurements."""
        if self.planning is not None and len(self.planning):
            self._take(self.planning, timeout_s)
        return self.follower.program is not None

    def _take(self, planning: Planning, timeout_s: float = 0.0) -> None:
        try:
            planned = planning.poll(timeout_s)
        except PlanError as error:
            self._end(str(error))
            return
        if planned is None or self._step is None:
            return
        self.latest_answer = planned.answer
        if planned.plan is None:
            _logger.info("no plan is followed: %s", planned.answer.error)
            return
        self.follower.program = schedule = make_schedule(planned.plan, self._step[1])
        self.follower.has_held = False  # its first step is watched
        self._num_misses = 0
        _logger.info(
            "following a plan: %d absences (%d not carried out), predicted %.1f ms a step (%.1f ms plain), peak %s",
            len(planned.plan.absences),
            schedule.num_not_carried_out,
            planned.answer.time_s * 1e3,
            planned.answer.plain_time_s * 1e3,
            format_bytes(planned.answer.peak_bytes + self._margin_bytes),
        )

    def _machine(self) -> Machine:
        """Return the machine as this session has measured it."""
        tier = self.follower.transfers.tier
        return Machine(
            name="measured",
            memory_bytes=self.budget_bytes,
            flops_per_s={"float32": 1e12},  # not used: op times are those of the trace
            memory_bytes_per_s=1e10,  # not used
            swaps_to="disk" if tier.name == "disk" else "host",
            host_out_bytes_per_s=tier.write_bytes_per_s,
            host_in_bytes_per_s=tier.read_bytes_per_s,
            host_memory_bytes=tier.capacity_bytes,
        )

    def _end(self, why: str) -> None:
        warn_once(f"no further step is planned: {why}")
        self.close()

    def close(self) -> None:
        """End the helper process."""
        planning, self.planning = self.planning, None
        if planning is not None:
            planning.close()

    def leave_child(self) -> None:
        """Use no helper in a forked child: it belongs to the parent."""
        if self.planning is not None:
            self.planning.leave_child()
