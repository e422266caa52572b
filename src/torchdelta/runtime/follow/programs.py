"""Has steps planned, compares what their programs predicted with what was measured, and has steps planned again.

The planner's inputs are measured: op times and bytes come from the trace, and the speed of the links from the tier's
transfers. Memory outside of known storages, which no trace shows, is subtracted from the budget, and half a percent; if
there is no plan then, only that memory. If a program needed room beyond its plan, its step is planned with less.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from torchdelta.errors import PlanError, TierError, TraceFileError
from torchdelta.notices import warn_once
from torchdelta.runtime.follow.asked import Asked
from torchdelta.runtime.follow.automatic import PLANNER, Automatic, may_plan
from torchdelta.runtime.follow.comparison import Comparison
from torchdelta.runtime.follow.departures import makes_states
from torchdelta.runtime.follow.measured_machine import MeasuredMachine
from torchdelta.runtime.follow.other_budgets import OtherBudgets
from torchdelta.runtime.follow.planning import Planning
from torchdelta.runtime.follow.predictions import Predictions, outside_s
from torchdelta.runtime.follow.program import Program
from torchdelta.runtime.follow.schedule import make_schedule
from torchdelta.runtime.follow.wanted import WantedSteps
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.runtime.follow.follower import EndedStep, Follower
    from torchdelta.runtime.follow.given_plan import GivenPlan
    from torchdelta.runtime.follow.planning import Planned
    from torchdelta.runtime.follow.program import Key
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.trace.model import Trace

__all__ = ["Programs"]

_logger = logging.getLogger("torchdelta")
_MARGIN_SHARE: Final = 0.005
_LARGER_MARGIN_SHARE: Final = 0.01  # added when a program did not hold
_MAX_PLANS: Final = 4  # of one step
_MISSES_ALLOWED: Final = 1  # in the first followed steps copies out may be slower than they were measured
_MOST_GIVEN_TRACES: Final = 3  # for a given plan; a trace can be dropped
_MOST_FIRST_STEPS: Final = 8  # an optimizer that makes new states in each step is planned all the same
_MOST_WAITING: Final = 4  # requests without an answer


class Programs:
    """The programs of one session. Mutable.

    Args:
        config: Names the planner; None is never to plan.
        follower: Carries the programs out.
        budget_bytes: The budget.
        given: A plan to follow in place of a planner's.
    """

    def __init__(self, config: Config, follower: Follower, budget_bytes: int, given: GivenPlan | None = None) -> None:
        self.follower = follower
        self.budget_bytes = budget_bytes
        self.cache = follower.programs
        self.given = given
        self.automatic: Automatic | None = None  # where the planner is "auto"
        if given is None and may_plan(config, follower.ledger.device.type):
            self.automatic = Automatic(follower.room)
            config = replace(config, planner=PLANNER)
        elif config.planner == "auto":
            config = replace(config, planner=None)
        self.planning = Planning(config) if config.planner is not None else None
        self.machine = MeasuredMachine(follower.transfers, follower.ledger.device, budget_bytes)
        self.predictions = Predictions(self.machine, self.cache)
        self.latest: Program | None = None  # the program of the latest followed step
        self._newest: Program | None = None  # the program that was made last
        self._name = given.name if given is not None else config.planner or ""
        self.num_programs = 0
        self.other_budgets = OtherBudgets(budget_bytes)
        self.why_no_plan = ""  # the latest time that there was none
        follower.is_on = (self.planning is not None and self.automatic is None) or given is not None
        self._asked: list[Asked] = []  # without an answer
        self._wanted = WantedSteps()
        self.comparison = None if self.automatic is None else Comparison(self.automatic, self.cache, self._wanted)
        self._num_given_traces = 0
        self._num_first_steps = 0  # traced steps that made optimizer states
        self._is_fruitless = False  # whether the running step was traced although it has a program
        self._is_traced = False
        if self.planning is not None and self.automatic is None and find_spec("numba") is None:
            self._end("numba is not installed: pip install 'torchdelta[plan]'")
        if self.planning is not None:
            self.machine.observe()

    @property
    def name(self) -> str:
        """The name of the planner or of the plan's file; empty if nothing is planned, or not yet."""
        return self._name if self.automatic is None or self.automatic.has_begun else ""

    # -- traces

    @property
    def wants_trace(self) -> bool:
        """Whether the next step is to be traced."""
        if self.given is not None:
            return not len(self.cache) and self._num_given_traces < _MOST_GIVEN_TRACES
        return (
            self.planning is not None
            and self._wanted.wants_trace
            and (self.automatic is None or self.automatic.has_begun)
            and len(self.planning) < _MOST_WAITING
            and self.follower.has_evicted
        )

    def on_trace_begin(self) -> None:
        """Count a step that is being traced: its trace may be dropped."""
        self._wanted.take_token()
        self._num_given_traces += 1
        self._is_traced = True

    def on_traced(self, trace: Trace, log: StepLog) -> None:
        """Ask for a program of a step that was traced to its end, if it has none. Call this before `on_step_end`."""
        position = self.follower.position
        key, start_bytes = position.key, position.start_bytes
        if key[0] != len(log.signatures):
            return  # a part of it was not traced, or is no part of the step
        known = self.cache.find(key, start_bytes)
        self._is_fruitless = self._has_program(key, start_bytes) or self._wanted.is_unplannable(key, start_bytes)
        if not key[0] or self._is_fruitless:
            return
        if log.uses and self._num_first_steps < _MOST_FIRST_STEPS and makes_states(trace):
            self._num_first_steps += 1
            self._num_given_traces -= 1  # it is no step that a given plan can be for
            return  # no later step is like it
        why = log.why_not_followed()
        if why:
            self._wanted.note_unplannable(key, 0)
            self.why_no_plan = why
            warn_once(f"no plan is followed: {why}; buffers are evicted reactively")
            return
        usage = self.follower.room.usage
        usage.ask_counter(fresh=True)
        unseen_bytes = max(0, usage.unseen_bytes)
        if self.given is not None:
            self._follow_given(self.given, trace, log, unseen_bytes)
            return
        margin_bytes = int(self.budget_bytes * _MARGIN_SHARE)
        if known is not None:  # it may have been planned without this margin, or with more
            known.wants_trace = False
            margin_bytes = known.margin_bytes - known.unseen_bytes
        asked = Asked(
            key=key,
            start_bytes=start_bytes,
            step=(trace, log),
            margin_bytes=unseen_bytes + margin_bytes,
            num_plans=1 if known is None else known.num_plans,
            unseen_bytes=unseen_bytes,
            replaces=known,
        )
        self._ask(asked)

    def needs_trace(self) -> bool:
        """Return, at its first save, whether the running step may be one without a program."""
        if self.given is not None:
            return True
        first = self.follower.position.first
        return self._wanted.begins(first) or not self.cache.begins(first)

    def _has_program(self, key: Key, start_bytes: int) -> bool:
        """Return whether a step has a program that need not be made anew, or will have one."""
        program = self.cache.find(key, start_bytes)
        return (program is not None and not program.wants_trace) or any(
            asked.key == key and self.cache.covers(asked.start_bytes, start_bytes) for asked in self._asked
        )

    # -- steps

    def on_step_end(self, steps: StepTracker) -> None:
        """Judge the program that has carried the step out, and take the programs that are ready."""
        ended = self.follower.ended
        room = self.follower.room
        unplanned_bytes, room.unplanned_bytes = room.unplanned_bytes, 0
        is_disturbed = self._is_traced or bool(self.planning)  # by a trace, or by the helper, which takes a core
        if ended is not None:
            program, is_fruitless, self._is_fruitless = ended.program, self._is_fruitless, False
            is_served = self.cache.is_full and program is not None and not unplanned_bytes
            self._wanted.on_step_end(ended, self._has_program, is_fruitless=is_fruitless, is_served=is_served)
            if program is None and self.comparison and ended.key[0] and not is_disturbed:
                self.comparison.on_reacting_step(ended.key, steps)
            if program is not None:
                self.latest = program
                is_own = ended.is_exact and self.cache.covers(program.start_bytes, ended.start_bytes)
                self._judge(program, ended.key, steps.last_peak_bytes, unplanned_bytes, is_own=is_own)
                program.num_disturbed += is_disturbed
                if not is_disturbed and not self.planning:  # its plan may just have been asked for anew
                    self._judge_times(program, ended, steps, is_own=is_own)
        self._is_traced = False
        has_no_trace = self._num_given_traces >= _MOST_GIVEN_TRACES and not self.num_programs and not self.why_no_plan
        if self.given is not None and has_no_trace:
            self._refuse_given(self.given, f"none of {_MOST_GIVEN_TRACES} traced steps was complete")
        if self.automatic is not None and self.planning is not None:
            self._go_on(self.automatic)
        self.on_unrecorded_step()

    def on_unrecorded_step(self) -> None:
        """Take a program that is ready; where there is none, the helper ends once it has been idle for long."""
        if self.planning is not None:
            if self.automatic is None or self.automatic.is_timing:
                self.machine.observe()
            self._take(self.planning)

    def on_step_refused(self) -> None:
        """Blame no later step for the room that had to be made in a step that the budget could not hold."""
        self.follower.room.unplanned_bytes = 0

    def on_trace_dropped(self) -> None:
        """Take a token back: the trace was dropped at the first save."""
        self._wanted.return_token()

    def _judge(self, program: Program, key: Key, peak_bytes: int, unplanned_bytes: int, *, is_own: bool) -> None:
        """Watch the backward of a program that did not hold the budget; plan it with less the second time."""
        has_held = not unplanned_bytes and peak_bytes <= self.budget_bytes
        if program.num_followed == 1 and self.follower.persistents is not None:
            is_own = False  # what is away at its start is not what the program would have left there
        if is_own:
            program.has_held = has_held
        if has_held:
            if program.num_followed > 1 and not (program is self._newest and self.predictions.may_correct(program)):
                program.step = None  # it will not be planned again from this trace
            return
        program.disprove(key)
        if not is_own:
            return
        program.num_misses += 1
        program.wrong_s = 0.0  # it is not to be followed again in place of a slower one
        if program.num_misses == _MISSES_ALLOWED + 1 and program.num_plans < _MAX_PLANS:
            over_bytes = max(peak_bytes - self.budget_bytes, unplanned_bytes)
            program.margin_bytes += over_bytes + int(self.budget_bytes * _LARGER_MARGIN_SHARE)
            program.num_plans += 1
            self._ask_again(program)

    def _judge_times(self, program: Program, ended: EndedStep, steps: StepTracker, *, is_own: bool) -> None:
        """Have a step planned again whose time or peak is not as predicted, or give its program up."""
        is_representative = not ended.was_watched or self.follower.persistents is not None  # there, all are watched
        is_representative = is_representative and program.had_optimizer == steps.has_stepped
        may_judge = is_own and program.has_held and is_representative
        if may_judge and self.predictions.is_wrong(program, steps.last_time_s, steps.last_peak_bytes):
            self._ask_again(program)
        elif self.automatic is not None and not self.cache.holds(program):
            self.automatic.forget_followed(ended.key)  # the earlier program is followed again
        elif program.num_followed > 1:
            self._compare_time(program, ended, steps)

    def _go_on(self, automatic: Automatic) -> None:
        """Time steps, and then have them planned, once that pays. See [Note: when a plan pays]."""
        self.follower.is_on = automatic.is_timing
        if automatic.is_timing and not automatic.begin_if_it_pays() and automatic.why_not:
            self.why_no_plan = automatic.why_not
            self.close()

    def _compare_time(self, program: Program, ended: EndedStep, steps: StepTracker) -> None:
        """Give a program up whose steps take longer than steps that reacted, if the planner is "auto"."""
        if self.comparison is None or (ended.is_exact and self.predictions.may_correct(program)):
            return  # in the second case, its time may have been predicted wrongly
        if self.comparison.gives_up(program, ended, steps) and ended.is_exact:  # else others follow it
            self.why_no_plan = "steps that followed their plan took longer than reactive steps"

    # -- plans

    def _ask_again(self, program: Program) -> None:
        """Have a step planned again: from its trace, or from a new one."""
        if program.step is None:
            program.wants_trace = True
            return
        self._ask(Asked.again(program, program.step))

    def _ask(self, asked: Asked) -> None:
        if self.planning is None:
            return
        try:
            machine, budget_bytes = self.machine.now(), self.budget_bytes - asked.margin_bytes
            asked = asked.planned_for(machine, budget_bytes)
            self.planning.ask(asked, asked.planned_step[0], asked.machine or machine, budget_bytes)
        except (OSError, TierError, TraceFileError) as error:
            self._end(str(error))
            return
        self._asked.append(asked)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the programs that were asked for. Return whether there is any. For tests and measurements."""
        while self.planning and self._take(self.planning, timeout_s):
            pass
        return len(self.cache) > 0

    def _take(self, planning: Planning, timeout_s: float = 0.0) -> bool:
        """Take one answer. Return whether there was one."""
        try:
            planned = planning.poll(timeout_s)
        except PlanError as error:
            self._end(str(error))
            return False
        if planned is None:
            return False
        if planned.key is self.other_budgets:
            self.other_budgets.add(planned.answer)
            return True
        self._asked = [asked for asked in self._asked if asked is not planned.key]
        self._add(planned, planned.key)
        return True

    def _add(self, planned: Planned, asked: Asked) -> None:
        if planned.plan is None:
            if asked.replaces is not None:
                asked.replaces.wrong_s = 0.0  # no other program was found for it
            other = asked.without_departing_gradients()
            other = other or (asked.without_margin() if asked.replaces is None else None) or asked.with_departures()
            if other is not None:
                self._ask(other)
            elif self.cache.find(asked.key, asked.start_bytes) is None:  # else the earlier program goes on
                level = logging.DEBUG if self.why_no_plan else logging.INFO  # once, not for each kind of step
                _logger.log(level, "plan: none is followed: %s", planned.answer.error)
                self.why_no_plan = planned.answer.error
                self._wanted.note_unplannable(asked.key, asked.start_bytes)
            return
        trace, log = asked.planned_step
        schedule = make_schedule(planned.plan, log)
        answer = asked.complete(planned.answer)
        program = Program(
            schedule=schedule,
            key=asked.key,
            start_bytes=asked.start_bytes,
            answer=answer,
            step=asked.step,
            margin_bytes=asked.margin_bytes,
            unseen_bytes=asked.unseen_bytes,
            machine=asked.machine,
            swapped_bytes=sum(trace.buffers[buffer_id].size_bytes for buffer_id in schedule.swapped),
            outside_s=outside_s(trace, log),
            had_optimizer=log.had_optimizer,
            num_plans=asked.num_plans,
        )
        if asked.replaces is not None:
            program.take_over(asked.replaces)
        if self.automatic is not None:
            self.automatic.forget_followed(asked.key)
        self._newest = program
        self._add_program(program)
        if self.planning is not None and self.num_programs == 1:
            self.other_budgets.ask(self.planning, asked, self.machine.now(), answer)
        _logger.log(
            logging.INFO if self.num_programs == 1 else logging.DEBUG,  # one line a run, not one for each kind of step
            "plan: following %s: %d absences (%d not carried out), predicted %.1f ms a step (%.1f ms plain), peak %s",
            self.name,
            len(planned.plan.absences),
            schedule.num_not_carried_out,
            program.predicted_time_s * 1e3,
            (answer.plain_time_s + program.outside_s) * 1e3,
            format_bytes(program.predicted_peak_bytes),
        )

    def _add_program(self, program: Program) -> None:
        self.num_programs += 1
        program.number = self.num_programs
        self.cache.add(program)

    def _follow_given(self, given: GivenPlan, trace: Trace, log: StepLog, unseen_bytes: int) -> None:
        self._num_given_traces = _MOST_GIVEN_TRACES  # the first complete trace decides
        try:
            program = given.program(trace, log, self.follower.position, self.budget_bytes, unseen_bytes)
        except PlanError as error:
            self._refuse_given(given, str(error))
            return
        self._add_program(program)
        given.report(program)

    def _refuse_given(self, given: GivenPlan, why: str) -> None:
        self.why_no_plan = f"{given.name}: {why}"
        self.follower.is_on = False
        warn_once(f"{given.name} is not followed: {why}; buffers are evicted reactively")

    def _end(self, why: str) -> None:
        self.why_no_plan = why
        warn_once(f"no further step is planned: {why}")
        self.close()

    def close(self) -> None:
        """End the helper process."""
        planning, self.planning = self.planning, None
        self._asked.clear()
        self.follower.is_on = len(self.cache) > 0
        if not self.follower.is_on:
            self.follower.leave("no step is planned any more")
        if planning is not None:
            planning.close()

    def leave_child(self) -> None:
        """Use no helper in a forked child: it belongs to the parent."""
        if self.planning is not None:
            self.planning.leave_child()
