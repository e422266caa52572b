"""A session: everything that is alive between a budget's start and its stop, on one thread.

It outlives the stop while saved tensors of its graphs are alive: a backward after the scope still finds what it needs.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchdelta._torch import (
    graph_task_id,
    mode_stack,
    remove_mode,
    remove_saved_hooks,
    without_mode,
)
from torchdelta.errors import NativeError, ScopeError
from torchdelta.modules import ModulePaths
from torchdelta.native.counting import new_counter
from torchdelta.runtime import faults, interrupts, patches
from torchdelta.runtime.backward import Backward
from torchdelta.runtime.compiled import CompiledRegions
from torchdelta.runtime.counters import Counters
from torchdelta.runtime.current import current_session, set_current_session
from torchdelta.runtime.device import session_device
from torchdelta.runtime.device_counter import DeviceCounter
from torchdelta.runtime.device_recorder import DeviceRecorder
from torchdelta.runtime.device_residency import DeviceResidency
from torchdelta.runtime.device_saved import DeviceSavedTensors
from torchdelta.runtime.garbage import collect_garbage
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.ledger import Ledger
from torchdelta.runtime.notices import say_once
from torchdelta.runtime.optimizers import first_step_bytes, is_trial
from torchdelta.runtime.placing import open_arena
from torchdelta.runtime.react import REGISTRY
from torchdelta.runtime.recorder import Recorder, execute
from torchdelta.runtime.rematerialize import Rematerializer
from torchdelta.runtime.residency import Residency
from torchdelta.runtime.resized import Resizes
from torchdelta.runtime.saved import SavedTensors
from torchdelta.runtime.scan import scan_storages
from torchdelta.runtime.steps import StepTracker
from torchdelta.runtime.subclasses import Subclasses
from torchdelta.runtime.survey import Survey
from torchdelta.runtime.tiers import open_tier
from torchdelta.runtime.tracing import TraceBuilder
from torchdelta.summary import Summary
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.trace.model import Trace

_logger = logging.getLogger("torchdelta")


class Session:
    """Wires the parts together and puts them onto torch."""

    def __init__(self, budget_bytes: int, config: Config) -> None:
        self.config = config
        self.budget_bytes = budget_bytes
        self.counters = Counters()
        self.ledger = Ledger(session_device())
        is_on_cpu = self.ledger.device.type == "cpu"
        self.residency = (Residency if is_on_cpu else DeviceResidency)(
            self.ledger,
            self.counters,
            REGISTRY[config.policy](),
            self._open_tier,
            budget_bytes if config.decisions is None else None,
        )
        self.rematerializer = Rematerializer(self.ledger, self.residency, self.counters)
        self.residency.recompute = self.rematerializer.recompute
        self.residency.missing_time_s = self.rematerializer.missing_time_s
        self.residency.on_shortage = self._on_shortage
        self.residency.collect_garbage = self._collect_garbage
        self.residency.digests = config.verify == "first-step"
        self.residency.prefetches = config.decisions is None
        if config.decisions is not None:
            self.residency.least_eviction_bytes = 0
        self.steps = StepTracker(self.ledger, self.counters)
        self.steps.on_step_end = self._on_step_end
        self.modules = ModulePaths()
        self.num_handles = 0
        self.collected_bytes = 0  # of garbage, so far
        self.survey: Survey | None = None
        self.node_name = ""
        self.subclasses = Subclasses(self)
        self.resizes = Resizes(self)
        if isinstance(self.residency, DeviceResidency):
            self.recorder = self.residency.recorder = DeviceRecorder(self)
            self.saved = DeviceSavedTensors(self, config.decisions)
        else:
            self.recorder = Recorder(self)
            self.saved = SavedTensors(self, config.decisions)
        self.compiled = CompiledRegions(self)
        self.backward = Backward(self, self.recorder)
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._optimizer_hooks: list[Any] = []
        self._foreseen: weakref.WeakSet[torch.optim.Optimizer] = (
            weakref.WeakSet()
        )  # those whose first step was tried on fake tensors
        self._is_stopped = False
        self._process_id = os.getpid()
        self._trace: Trace | None = None
        self.placing = open_arena(self)

    def _open_tier(self) -> Any:
        return open_tier(
            self.config.tier,
            device=self.ledger.device,
            swap_dir=self.config.swap_dir,
            host_budget_bytes=self.config.host_budget_bytes,
            disk_budget_bytes=self.config.disk_budget_bytes,
            checksum=self.config.checksum,
        )

    # -- on and off

    @shielded
    def start(self) -> None:
        """Count what exists, then watch everything on this thread."""
        if current_session() is not None:
            msg = "a MemoryBudget is already running on this thread: budgets do not nest"
            raise ScopeError(msg)
        interrupts.start()
        try:
            patches.patch()
        except BaseException:
            interrupts.stop()
            raise
        try:
            self._put_on()
        except BaseException:
            if current_session() is self:
                set_current_session(None)
                if self.recorder in mode_stack():
                    remove_mode(self.recorder)
                self._take_hooks_off()
            patches.unpatch()
            self.placing.stop()
            interrupts.stop()
            raise

    def _put_on(self) -> None:
        self._count()
        self.ledger.trace = TraceBuilder(self)
        scan_storages(self.ledger)
        self.ledger.restart_peak()
        set_current_session(self)
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack)
        self._hooks.__enter__()
        self.resizes.start()
        self.recorder.__enter__()
        self.placing.start()

    def _count(self) -> None:
        """Count at the allocator where that can be had, else say what is done in its place."""
        if not self.config.count_allocations or self.config.decisions is not None:
            return
        if self.ledger.device.type != "cpu":
            self.ledger.count_with(DeviceCounter(self.ledger.device))
            return
        counter = new_counter()
        if isinstance(counter, NativeError):
            say_once(f"not counting at the allocator ({counter}): what ops allocate inside themselves is estimated")
        else:
            self.ledger.count_with(counter)

    @shielded
    def stop(self) -> None:
        """Take everything off again. What saved tensors still need stays until the last of them is gone."""
        if self._process_id != os.getpid():
            return  # in a forked child there is nothing on
        if current_session() is not self:
            msg = "this MemoryBudget is not running on this thread: start and stop it on the same one"
            raise ScopeError(msg)
        try:
            self._take_off()
        finally:
            interrupts.stop()

    def _take_off(self) -> None:
        self._is_stopped = True
        self.placing.stop()
        if self.ledger.counter is not None:
            self.ledger.counter.stop()
        if self.steps.is_after_backward and self.survey is None:
            self.steps.end()  # the last step of a loop without an optimizer
        self._end_trace()
        set_current_session(None)
        if self.recorder in mode_stack():
            self.recorder.__exit__(None, None, None)
        self._take_hooks_off()
        self.resizes.stop()
        patches.unpatch()
        impossible = self.survey.error(is_lower_bound=True) if self.survey is not None else None
        self.steps.peak_bytes = max(self.steps.peak_bytes, self.ledger.peak_bytes)
        _logger.info("result: %s", str(self.summary()).splitlines()[0])
        if self.num_handles == 0:
            self._finish()
        else:
            self._distrust_what_is_not_held()
        if impossible is not None:
            raise impossible

    def leave_child(self) -> None:
        """Take off in a forked child what acts on its one thread."""
        while self.recorder in mode_stack():
            remove_mode(self.recorder)
        self._take_hooks_off()
        self.resizes.leave_child()
        self.placing.leave_child()

    def _take_hooks_off(self) -> None:
        if self._hooks is not None:
            remove_saved_hooks(self._hooks.pack_hook, self._hooks.unpack_hook)
            self._hooks = None
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()

    def _distrust_what_is_not_held(self) -> None:
        """After the scope nobody sees writes: what lives only because the user holds it will be replayed, not read."""
        for record in list(self.ledger.records.values()):
            buffer = record.current
            if buffer is not None and buffer.strong is None and (buffer.op is not None or buffer.copy is not None):
                record.current = None
                buffer.record = None

    def _finish(self) -> None:
        self.ledger.cut()
        self.ledger.forget()
        self.residency.close()

    def summary(self) -> Summary:
        """Return what was done so far."""
        counters = self.counters
        gone_bytes = counters.swapped_out_bytes + counters.dropped_bytes
        return Summary(
            budget_bytes=self.residency.budget_bytes,
            peak_bytes=max(self.steps.peak_bytes, self.ledger.peak_bytes),
            kept_bytes=max(0, counters.kept_bytes - gone_bytes),
            swapped_out_bytes=counters.swapped_out_bytes,
            swapped_in_bytes=counters.swapped_in_bytes,
            recomputed_bytes=counters.recomputed_bytes,
            num_recomputed_ops=counters.num_recomputed_ops,
            stall_s=counters.stall_s,
            recompute_s=counters.recompute_s,
            steps=self.steps.summaries,
        )

    # -- events

    def on_last_handle(self) -> None:
        """No saved tensor is left: nothing that was recorded will be replayed."""
        self.ledger.cut()
        self.residency.forget()
        if self._is_stopped:
            self._finish()

    def _collect_garbage(self) -> int:
        # An op may be under way: were the last handle to go now, what it reads would be forgotten.
        self.num_handles += 1
        try:
            freed_bytes = collect_garbage(self.ledger)
            self.collected_bytes += freed_bytes
            return freed_bytes
        finally:
            self.num_handles -= 1
            if self.num_handles == 0 and self._is_stopped:
                self.on_last_handle()  # else the next last handle calls it

    def on_backward_end(self, *, keeps_graph: bool) -> None:
        """A backward pass is over."""
        self.residency.note_stall()
        self.steps.on_backward_end(keeps_graph=keeps_graph)
        if self.num_handles == 0 and self.subclasses.were_met and not keeps_graph:
            self.ledger.cut()  # all that was saved was kept: no last handle will say that it is over

    @shielded
    def _before_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if current_session() is self and not is_trial(optimizer):
            if self.survey is not None:
                raise self.survey.error(is_lower_bound=True)
            self.steps.on_optimizer_start()
            if optimizer not in self._foreseen and not optimizer.state and self.residency.budget_bytes is not None:
                self._foreseen.add(optimizer)
                with without_mode(self.recorder):
                    state_bytes, temporary_bytes = first_step_bytes(optimizer)
                if state_bytes:
                    self.residency.room(state_bytes + temporary_bytes, f"the first step of {type(optimizer).__name__}")

    @shielded
    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if current_session() is self and not is_trial(optimizer):
            self.steps.on_optimizer_end()

    def _on_step_end(self) -> None:
        self.residency.digests = False
        if self.steps.num_steps == 1:
            self._log_first_step()
        if self.ledger.trace is not None:
            self._end_trace()
        self.placing.on_step_end()

    def _log_first_step(self) -> None:
        counters = self.counters
        _logger.info(
            "captured a step: %d ops, %d saved tensors, peak %s of %s",
            counters.num_ops,
            counters.num_saved,
            format_bytes(self.steps.peak_bytes),
            format_bytes(self.budget_bytes),
        )
        if self.ledger.late_bytes:
            _logger.info(
                "%s of parameters were not found when the scope opened and counted from their first use",
                format_bytes(self.ledger.late_bytes),
            )
        if counters.num_evictions == 0:
            _logger.info("the step fits: nothing leaves the device, recording is the only cost")
        else:
            _logger.info(
                "policy %s: %s swapped out, %s dropped for recomputing",
                self.config.policy,
                format_bytes(counters.swapped_out_bytes),
                format_bytes(counters.dropped_bytes),
            )

    def _end_trace(self) -> None:
        builder, self.ledger.trace = self.ledger.trace, None
        if builder is not None and (self.steps.num_steps or self.steps.is_after_backward):
            self._trace = builder.finish()

    def trace(self) -> Trace | None:
        """Return the trace of the first step, None while it is not complete or when it was dropped."""
        return self._trace

    def _on_shortage(self, size_bytes: int, why: str) -> None:
        """The budget cannot hold at this op. See [Note: an impossible budget] in survey.py."""
        if self.survey is None:
            self.ledger.trace = None  # no whole step will come of this one
            self.survey = Survey(self)
            self.survey.need(size_bytes, why)
            is_trainable = torch.is_grad_enabled() or graph_task_id() != -1 or self.num_handles > 0
            if self.steps.is_in_optimizer or not is_trainable or self._is_stopped:
                raise self.survey.error(is_lower_bound=False)
            _logger.info(
                "the budget of %d bytes cannot hold at %s: surveying the rest of the step", self.budget_bytes, why
            )
        self.survey.need(size_bytes, why)

    def end_survey(self) -> None:
        """Go back to real tensors."""
        self.survey = None
        self.ledger.is_counting = self.ledger.counter is not None
        self.ledger.new_device = self.ledger.device
        self.ledger.counted_devices = frozenset({self.ledger.device})
        self.residency.budget_bytes = self.budget_bytes
        self.residency.surveys = False
        self.residency.prefetches = True
        self.recorder.execute = execute


def _leave_child() -> None:
    """Take the scope off in a forked child, such as a worker of a DataLoader, without any effect on the parent.

    The child inherits dispatch mode, hooks and ledger, but neither the tier's threads nor its file: without this a
    worker's tensors would be counted in its copy of the ledger, and when that was full it would swap in vain.
    The patches stay: without a session they do nothing, and their lock may be held by a thread that the child lacks.
    """
    patches.leave_child()
    session = current_session()
    if session is None or faults.is_disabled("fork"):
        return
    set_current_session(None)
    session.leave_child()


os.register_at_fork(after_in_child=_leave_child)
