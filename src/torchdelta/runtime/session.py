"""A session: the parts of the runtime between a budget's start and its stop, on one thread.

It outlives the stop while saved tensors of its graphs are alive, so that a backward after the scope still works.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import enter_lowest, leave_stack, mode_stack, remove_ended_modes, remove_mode
from torchdelta.arena.placing import open_arena
from torchdelta.errors import NativeError, ScopeError
from torchdelta.modules import ModulePaths
from torchdelta.notices import warn_once
from torchdelta.runtime import interrupts, patches
from torchdelta.runtime.call_all import call_all
from torchdelta.runtime.current import current_session, set_current_session
from torchdelta.runtime.device.accelerator import Accelerator
from torchdelta.runtime.device.device import Device
from torchdelta.runtime.device.memory import session_device
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.follow.follower import Follower
from torchdelta.runtime.follow.persistent_cursor import PersistentCursor
from torchdelta.runtime.follow.programs import Programs
from torchdelta.runtime.follow.report import FollowReport
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.memory.costs import Costs
from torchdelta.runtime.memory.persistents import Persistents
from torchdelta.runtime.memory.restore import Restorer
from torchdelta.runtime.memory.room import LEAST_EVICTION_BYTES, Room
from torchdelta.runtime.memory.transfers import Transfers
from torchdelta.runtime.observe.step_traces import StepTraces
from torchdelta.runtime.observe.trace_output import TraceOutput
from torchdelta.runtime.optimizer_steps import OptimizerSteps
from torchdelta.runtime.policies import REGISTRY
from torchdelta.runtime.record.backward import Backward
from torchdelta.runtime.record.bringing import recorder_for
from torchdelta.runtime.record.compiled import CompiledRegions
from torchdelta.runtime.record.other_streams import OtherStreams
from torchdelta.runtime.record.owners import Owners
from torchdelta.runtime.record.partial import PartialRecording
from torchdelta.runtime.record.pause import Pause, may_pause
from torchdelta.runtime.record.raw_writes import RawWrites
from torchdelta.runtime.record.readers import Readers
from torchdelta.runtime.record.resized import Resizes
from torchdelta.runtime.record.saved import SavedTensors
from torchdelta.runtime.record.subclasses import Subclasses
from torchdelta.runtime.record.transforms import Transforms
from torchdelta.runtime.report import log_first_step, log_result, log_start, summarize
from torchdelta.runtime.saved_hooks import SavedHooks
from torchdelta.runtime.shared_tier import shared_tier_opener
from torchdelta.runtime.state.counters import Counters
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.state.steps import StepTracker
from torchdelta.runtime.survey.program_state import drop_fake_gradients
from torchdelta.runtime.survey.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.config import Config
    from torchdelta.runtime.follow.given_plan import GivenPlan
    from torchdelta.summary import PlainPeak, Summary
    from torchdelta.trace.model import Trace

_logger = logging.getLogger("torchdelta")


class Session:
    """Wires the parts together and installs them in torch. A part gets the parts that it uses, never the session."""

    def __init__(self, budget_bytes: int, config: Config, plan: GivenPlan | None, trace_out: str | None) -> None:
        self.config = config
        self.budget_bytes = budget_bytes
        forces = config.decisions is not None
        self._limit_bytes = None if forces else budget_bytes
        self.counters = Counters()
        torch_device = session_device()
        self.device = Device(torch_device) if torch_device.type == "cpu" else Accelerator(torch_device)
        self.ledger = Ledger(torch_device)
        self.ledger.on_last_handle = self._on_last_handle
        self.steps = StepTracker(self.ledger, self.counters)
        self.steps.on_step_end = self._on_step_end
        transfers = Transfers(self.ledger, self.counters, shared_tier_opener(config, torch_device))
        is_all = config.decision_class == "all"
        self.room = Room(
            ledger=self.ledger,
            counters=self.counters,
            transfers=transfers,
            costs=Costs(self.ledger, transfers),
            device=self.device,
            policy=REGISTRY[config.policy](),
            budget_bytes=self._limit_bytes,
            on_shortage=self._on_shortage,
            least_eviction_bytes=0 if forces else LEAST_EVICTION_BYTES,
            persistents=Persistents(self.ledger, transfers, self.steps, Owners(self.ledger)) if is_all else None,
        )
        self.room.digests = config.verify == "first-step"
        self.restorer = Restorer(self.ledger, self.room, prefetches=not forces)
        self.subclasses = subclasses = Subclasses(self.ledger)
        self.follower = Follower(self.restorer)
        if self.room.persistents is not None:
            self.follower.persistents = PersistentCursor(self.room.persistents, self.steps)
        self.programs = Programs(config, self.follower, budget_bytes, plan)
        self.following = FollowReport(self.programs, self.follower)
        self.saved = SavedTensors(self.restorer, self.steps, subclasses, ModulePaths(), config.decisions, self.follower)
        streams = self.device.streams
        other_streams = OtherStreams(streams, self.ledger, transfers) if streams is not None else None
        self.recorder = recorder_for(self.restorer, self.saved, subclasses, other_streams)
        self.readers = Readers(self.room.persistents)
        self.compiled = CompiledRegions(self.recorder, self.room, self.steps, self.take_error)
        self.transforms = Transforms(self.recorder, self.take_error)
        self.backward = Backward(self.recorder, self.steps, self._on_backward_end)
        self.raw_writes = RawWrites(self.recorder, self.backward.python_writes)
        self.pause = Pause(self.recorder, self.saved, self.steps, is_allowed=plan is None and may_pause(config))
        self.partial = PartialRecording(self.recorder, self.saved, self.backward, self.pause)
        self.room.find_more = self.partial.find_more
        self.optimizers = OptimizerSteps(
            self.recorder,
            self.steps,
            self.pause,
            self.partial,
            is_running=lambda: current_session() is self,
            end_survey=self._end_survey_at_optimizer,
        )
        self.resizes = Resizes(self.restorer, self.partial.leave_tape)
        self.survey: Survey | None = None
        self.traces = StepTraces(self.ledger, self.steps, self.device, self.programs, TraceOutput(trace_out))
        self.placing = open_arena(
            config,
            torch_device,
            trace=self.trace,
            room_bytes=lambda: max(0, budget_bytes - self.ledger.usage.total_bytes),
        )
        self._saved_hooks = SavedHooks()
        self._may_finish = False  # whether the scope has ended, and what was away has been brought back
        self._process_id = os.getpid()

    @shielded
    def start(self) -> None:
        """Count the storages that exist, then watch all ops of this thread."""
        if current_session() is not None:
            raise ScopeError(
                "a MemoryBudget is already running on this thread, and budgets do not nest: "
                "stop it first, with MemoryBudget.current().stop()"
            )
        remove_ended_modes()
        interrupts.start()
        try:
            patches.patch()
        except BaseException:
            interrupts.stop()
            raise
        try:
            self._install()
        except BaseException:
            if current_session() is self:
                set_current_session(None)
                if self.recorder in mode_stack():
                    remove_mode(self.recorder)
                self._saved_hooks.remove()
                self.optimizers.stop()
            self.resizes.stop()
            self.readers.stop()
            patches.unpatch()
            self.placing.stop()
            self.ledger.usage.stop_counting()
            self.ledger.forget()
            interrupts.stop()
            raise

    def _install(self) -> None:
        self._count()
        self.traces.begin()
        self.room.begin()
        set_current_session(self)
        self.optimizers.start()
        self._saved_hooks.enter(*self.pause.open_hooks())
        self.resizes.start()
        self.readers.start()
        enter_lowest(self.recorder)
        self.placing.start()
        log_start(self.config, self.budget_bytes, self.ledger.device)

    def _count(self) -> None:
        """Count at the allocator where that is possible, else log once that workspace is estimated."""
        if not self.config.count_allocations or self.config.decisions is not None:
            return
        counter = self.device.new_counter()
        if isinstance(counter, NativeError):
            warn_once(f"not counting at the allocator ({counter}): the workspace of ops is estimated")
        else:
            self.ledger.usage.count_with(counter)

    @shielded
    def stop(self) -> None:
        """Remove everything from torch. What living saved tensors need is kept until the last of them dies."""
        if self._process_id != os.getpid():
            return  # in a forked child nothing is installed
        if current_session() is not self:
            raise ScopeError("this MemoryBudget is not running on this thread: start and stop it on the same one")
        try:
            self._uninstall()
        finally:
            interrupts.stop()

    def _uninstall(self) -> None:
        self.ledger.is_closing = True
        ends: tuple[Callable[[], object], ...] = (
            self.placing.stop,
            self.pause.close,
            self.partial.leave_tape,
            self.partial.close,
            self.programs.close,
            self.ledger.usage.stop_counting,
            self._end_last_step,
            self.traces.stop,
            lambda: set_current_session(None),
            lambda: leave_stack(self.recorder),
            self._saved_hooks.remove,
            self.optimizers.stop,
            self.resizes.stop,
            self.readers.stop,
            patches.unpatch,
            self._end_survey,
            self._bring_back,  # if this fails, too, its error is raised: what cannot be brought back is lost
            lambda: log_result(self._summary(None)),
            self._end,
        )
        call_all(ends)

    def _end_last_step(self) -> None:
        """End the last step of a loop without an optimizer."""
        if self.steps.is_after_backward and self.survey is None:
            self.steps.end()

    def _end_survey(self) -> None:
        if self.survey is not None:
            raise self.survey.error(is_lower_bound=True)

    def _bring_back(self) -> None:
        self.steps.peak_bytes = max(self.steps.peak_bytes, self.ledger.usage.peak_bytes)
        if self.room.persistents is not None:  # after the peak was noted
            self.room.persistents.close()
            self.room.budget_bytes = None  # what had left may not fit: from now on nothing is refused

    def _end(self) -> None:
        self._may_finish = True
        if self.ledger.num_handles == 0:
            self._finish()
        else:
            self.ledger.invalidate_unheld()

    def leave_child(self) -> None:
        """Remove from a forked child what acts on its one thread."""
        set_current_session(None)
        self.pause.close()
        self.partial.close()
        self.recorder.is_over = True
        while self.recorder in mode_stack():
            remove_mode(self.recorder)
        self._saved_hooks.remove()
        self.optimizers.stop()
        self.resizes.leave_child()
        self.readers.leave_child()
        self.placing.leave_child()
        self.programs.leave_child()

    def leave_backward(self) -> None:
        """Remove from this thread what the engine has put back after the session was stopped in a backward."""
        remove_ended_modes()
        self._saved_hooks.remove_again()

    def _finish(self) -> None:
        self.ledger.cut()
        self.ledger.forget()
        self.room.transfers.close()

    def summary(self) -> Summary:
        """Return the summary so far."""
        return self._summary(self.traces.plain_peak())

    def _summary(self, peak: PlainPeak | None) -> Summary:
        return summarize(self.room, self.steps, self._limit_bytes, self.following.summary(self.steps.num_steps), peak)

    def _on_last_handle(self) -> None:
        """Forget the tape: no saved tensor is left, so nothing recorded will be replayed."""
        if self.ledger.num_handles or self.partial.waits_for_native_handles(self._on_last_handle):
            return  # the graph of a metric has died, for example: the forward goes on
        self.ledger.cut()
        self.room.forget()
        if graph_task_id() == -1 and not self.steps.had_any_backward:
            self._on_step_abandoned()
        self.steps.on_graph_over()
        if self._may_finish:
            self._finish()

    def _on_backward_end(
        self, *, keeps_graph: bool, is_outermost: bool, leaves: list[Any], error: BaseException | None
    ) -> None:
        """Handle the end of a backward pass. At the end of an impossible step's backward, raise its BudgetError."""
        if self.recorder.is_over:  # a hook, or a signal handler, has stopped the session
            drop_fake_gradients(leaves)
            return
        if self.survey is not None:
            self.survey.leaves.extend(leaves)
        elif isinstance(error, BudgetError):  # the survey has ended in the middle of this backward
            drop_fake_gradients(leaves)
        if error is not None:
            self.traces.drop_later()
            self.follower.leave(f"its backward raised {type(error).__name__}")
        if not is_outermost:
            return
        self.room.transfers.note_stall()
        self.steps.on_backward_end(keeps_graph=keeps_graph)
        if error is None and not keeps_graph:
            self.pause.on_backward_end()
            self.partial.begin_if_followed()
        if self.ledger.num_handles == 0 and self.subclasses.were_met and not keeps_graph:
            self.ledger.cut()  # all saved tensors were kept, so no last handle will trigger this
        elif not self.steps.has_optimizer:  # nothing else does
            self.ledger.cut_unread()
        if self.survey is not None and not isinstance(error, BudgetError | KeyboardInterrupt):
            if keeps_graph and error is None:
                self.survey.had_backward = True
                return  # a further backward of this graph may follow: the next loss, or a penalty's
            # If the backward raised an error itself, it was not surveyed to its end.
            raise self.survey.error(is_lower_bound=error is not None) from error

    def _end_survey_at_optimizer(self) -> None:
        """Raise the BudgetError of a survey that runs: an optimizer is about to step."""
        if self.survey is not None:
            raise self.survey.error(is_lower_bound=not self.survey.had_backward, in_optimizer=True)

    def _on_step_end(self) -> None:
        self.room.digests = False
        if self.steps.num_steps == 1:
            log_first_step(self.room, self.steps, self.budget_bytes, self.saved.num_elsewhere)
        self.pause.on_step_end()
        if self.pause.is_on:
            self.programs.on_unrecorded_step()
            return
        self.traces.end()
        self.placing.on_step_end()
        self.follower.on_step_end()
        self.partial.on_step_end()
        self.following.on_step_end(self.steps)
        self.programs.on_step_end(self.steps)
        if not self.ledger.is_closing:
            self.traces.begin_later()

    def _on_step_abandoned(self) -> None:
        """Begin anew: what was saved so far had no backward, as in an evaluation or after an exception."""
        self.steps.on_abandoned()
        self.traces.on_abandoned()
        if self.follower.position.num_saves:
            if self.follower.abandon():
                self.traces.forget_saves()
            else:  # the next step may be without an evaluation, which would take room in every plan
                self.traces.drop_later()

    def trace(self) -> Trace | None:
        """Return the trace of the first step; None before that step is complete or if the trace was dropped."""
        return self.traces.first

    def _on_shortage(self, size_bytes: int, why: str) -> None:
        """Begin or continue a survey: the budget cannot hold. See [Note: an impossible budget] in survey/survey.py."""
        if self.survey is None:
            if self.steps.is_after_backward and torch.is_grad_enabled() and not self.steps.is_in_optimizer:
                self.steps.end()  # this is the next step's forward: what ran before it was not refused
            self.follower.refuse()
            leaves = self.backward.running_leaves
            self.survey = Survey(self.recorder, self.budget_bytes, running_leaves=leaves, on_end=self._on_survey_end)
            self.traces.drop()  # this step will not be complete
            self.survey.begin()
            self.survey.need(size_bytes, why)
            is_trainable = torch.is_grad_enabled() or graph_task_id() != -1 or self.ledger.num_handles > 0
            if not is_trainable or self.steps.is_in_optimizer or self.ledger.is_closing or self.compiled.is_running():
                # After an evaluation, or after the scope, the rest of the step is unknown.
                raise self.survey.error(is_lower_bound=self.compiled.is_running() or not self.steps.is_in_optimizer)
            _logger.info("out of budget at %s: the rest of the step runs on fake tensors to find the least budget", why)
        self.survey.need(size_bytes, why)

    def take_error(self) -> BudgetError:
        """End the survey before the end of the step, and return its error."""
        assert self.survey is not None
        return self.survey.error(is_lower_bound=True)

    def _on_survey_end(self) -> None:
        self.survey = None
        self.follower.restart()
        self.programs.on_step_refused()
        self.steps.refuse()
        if self.ledger.num_handles == 0:
            self._on_last_handle()
