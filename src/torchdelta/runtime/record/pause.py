"""Pauses recording in steps that are known to fit: only light saved-tensor hooks remain.

[Note: steps that are not recorded]
Recording runs Python for every op, and is of use only if something has to leave. If two consecutive steps evicted
nothing, saved tensors of the same sizes in the same order, had the same peaks, and left a tenth of the budget free, the
next ones are expected to fit as well. The dispatch mode is then taken off the thread. Four things guard the budget:

* The native hooks compare the size of each saved tensor with that of the recorded steps. A larger one, or one more,
  resumes recording before the next op: a larger batch is noticed at its first saved tensor.
* The counter at the allocator has a limit, 2 % and 4 KiB above the highest recorded forward or, from the backward on,
  above the highest step. Passing it calls `Pause.on_limit` between two instructions of Python. Recording resumes before
  the next op (see [Note: moments between ops] in between_ops.py); in a backward or a transform, at its end. Outside of
  backwards, an allocation that would exceed the budget itself is refused with torch's own error. In a backward nothing
  is refused: its forward saved no more tensors than the recorded ones, and none larger in its place, so only a backward
  that does something else can need more.
* A backward starts unrecorded only if it starts with no more bytes than the recorded ones did, within the same 2 % and
  4 KiB, and keeps its graph (`create_graph`, as for a gradient penalty) only if recorded ones did.
* Saved tensors go through native hooks (native/saved_hooks.cpp). When recording resumes, what was saved so far becomes
  known like any other saved tensor, so it can be swapped out. It cannot be recomputed: its ops were not recorded.

A pause begins after an optimizer's step. As long as no optimizer has stepped in the session, it begins after a backward
that freed its graph. In such loops the forward has the limit of the whole step as well: the program updates its
parameters itself after the backward, and nothing shows when it has finished.

After each time that a step turned out to be larger, eight times as many steps must be alike before the next pause:
where the lengths of sequences vary, every step is recorded. Steps are always recorded on accelerators whose allocator
cannot call back, on threads other than the main one (`on_limit` would not run there), with tensor subclasses, compiled
regions, transforms that forbid saved-tensor hooks or persistent tensors that leave, and while a step is traced or
follows a plan.

[Note: pauses on an accelerator]
The limit is that of CUDA's active bytes (native/device_watch.py). Its allocator refuses nothing that the device has
room for: an allocation may exceed the budget, and recording resumes right after it. A backward runs on another thread
while the main one waits, so there recording resumes at its end. What was saved so far then stays on the device, because
it may have been made on streams that recording has not seen.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import insert_mode, outside_inference_mode, position_of_mode, remove_mode
from torchdelta.errors import NativeError
from torchdelta.native.saved_hooks import NativeHooks, new_hooks
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.record.between_ops import is_between_ops, must_defer
from torchdelta.runtime.record.shared_gradients import keep_apart
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.config import Config
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["Pause", "may_pause"]

_logger = logging.getLogger("torchdelta")

_FEWEST_ALIKE: Final = 2
_MOST_ALIKE: Final = 4096
_NEVER: Final = 1 << 62
_MORE_ALIKE: Final = 8
_ALIKE: Final = 1.05  # the peaks of steps that count as alike differ by no more
_LARGER: Final = 1.02
_SLACK_BYTES: Final = 4096  # numbers and states of generators: what differs by less is alike, however small it is
_SHARE_OF_BUDGET: Final = 0.9


class Pause:
    """Whether the steps of a session are recorded at the moment. Mutable.

    Args:
        recorder: The dispatch mode that records; knows the room, the ledger and the device.
        saved: Its Python hooks.
        steps: The position in the training step.
        is_allowed: Whether recording may pause at all in this session.
    """

    def __init__(self, recorder: Recorder, saved: SavedTensors, steps: StepTracker, *, is_allowed: bool) -> None:
        self.is_on = False
        self.num_resumed = 0  # how many pauses have ended while the session ran
        self._recorder = recorder
        self._saved = saved
        self._steps = steps
        self._room = recorder.room
        self._ledger = recorder.ledger
        self._usage = recorder.ledger.usage
        self._is_allowed = is_allowed
        self.hooks: NativeHooks | None = None  # native ones, if recording may pause
        self._position = 0  # of the recorder on the stack of dispatch modes
        self._must_end = False
        # In a pause: whether a backward has freed its graph, so that what is saved now belongs to the next step.
        self._saves_begin_anew = False
        self._saves_nothing = False  # whether the latest recorded step saved nothing
        self._num_needed = _FEWEST_ALIKE
        self._num_evictions = 0
        # Of the steps that are alike so far: how many, and their maxima.
        self._num_alike = 0
        self._peak_bytes = 0
        self._forward_peak_bytes = 0
        self._forward_bytes = 0  # at the start of a backward
        self._keeps_graphs = False  # whether the latest has a backward that keeps its graph
        # Of the running step.
        self._step_forward_peak_bytes = 0
        self._step_forward_bytes = 0

    def open_hooks(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return the pack and unpack hooks of the session: native ones if recording may pause."""
        saved = self._saved
        if self._is_allowed and self._usage.sees_peaks and threading.current_thread() is threading.main_thread():
            asked = (saved.let_stay, saved.raise_modified, self.on_limit, keep_apart)
            hooks = new_hooks(saved.pack, saved.unpack, *asked)
            if not isinstance(hooks, NativeError):
                self.hooks = hooks
                return hooks.pack, hooks.unpack
            _logger.debug("every step is recorded: %s", hooks)
        return saved.pack, saved.unpack

    # -- recorded steps

    def on_backward_start(self) -> None:
        """Measure the forward that has ended."""
        if self.hooks is not None and graph_task_id() == -1:
            self._usage.ask_counter(fresh=True)
            self._step_forward_bytes = max(self._step_forward_bytes, self._usage.total_bytes)
            self._step_forward_peak_bytes = max(self._step_forward_peak_bytes, self._usage.peak_bytes)

    def on_step_end(self) -> None:
        """Compare the step with the earlier ones; in a pause, set the limit for the next forward."""
        if self.hooks is None:
            return
        if self.is_on:
            begins_anew, self._saves_begin_anew = self._saves_begin_anew, False
            if not begins_anew:
                self.hooks.end_step()
            self._guard_forward()
            return
        self._saves_nothing = self.hooks.num_sizes() == 0
        is_same = self.hooks.end_step()
        forward_peak_bytes, self._step_forward_peak_bytes = self._step_forward_peak_bytes, 0
        forward_bytes, self._step_forward_bytes = self._step_forward_bytes, 0
        peak_bytes = self._steps.last_peak_bytes
        num_evictions = self._room.counters.num_evictions
        is_alike = (
            is_same
            and num_evictions == self._num_evictions
            and _are_alike(peak_bytes, self._peak_bytes)
            and _are_alike(forward_peak_bytes, self._forward_peak_bytes)
        )
        self._num_evictions = num_evictions
        if not is_alike:
            self._num_alike = self._peak_bytes = self._forward_peak_bytes = self._forward_bytes = 0
        self._num_alike += 1
        self._keeps_graphs = self._steps.last_kept_graph
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self._forward_peak_bytes = max(self._forward_peak_bytes, forward_peak_bytes)
        self._forward_bytes = max(self._forward_bytes, forward_bytes)

    def on_optimizer_end(self) -> None:
        """Pause if the next step is expected to fit."""
        if not self._steps.is_after_backward and self._may_begin():
            self._begin()

    def on_backward_end(self) -> None:
        """End a step that saved nothing; if no optimizer has stepped, pause if the next step is expected to fit.

        Call this after a recorded backward that freed its graph.
        """
        if self._ledger.surveys:
            return
        steps = self._steps
        steps.on_graph_freed()
        if steps.has_optimizer or not self._may_begin():
            return
        if steps.is_after_all_backwards:
            steps.end_early()
        if not steps.is_after_backward and self._may_begin():  # this step was like the others
            self._begin()

    def _may_begin(self) -> bool:
        recorder, ledger, budget_bytes = self._recorder, self._ledger, self._room.budget_bytes
        return (
            self.hooks is not None
            and not self.is_on
            and self._num_alike >= self._num_needed
            and budget_bytes is not None
            and self._peak_bytes <= _SHARE_OF_BUDGET * budget_bytes
            and ledger.num_handles == 0
            and not ledger.surveys
            and not self._room.transfers.leaving
            and not ledger.observing.observer.wants_every_op
            and not recorder.only_counts
            and not recorder.subclasses.were_met
            and graph_task_id() == -1
            and position_of_mode(recorder) != -1
        )

    def _begin(self) -> None:
        assert self.hooks is not None
        self._position = position_of_mode(self._recorder)
        remove_mode(self._recorder)
        self.hooks.pause()
        self._steps.is_unrecorded = self.is_on = True
        self._must_end = self._saves_begin_anew = False
        self._step_forward_bytes = self._step_forward_peak_bytes = 0
        self._guard_forward()
        _logger.debug("recording pauses: steps peak at %s", format_bytes(self._peak_bytes))

    # -- steps that are not recorded

    def run_backward(
        self, record: Callable[..., Any], original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward unrecorded if it is expected to fit; else let `record` run it.

        Args:
            record: Runs a recorded backward, given all the other arguments.
            original: The engine.
            outputs: Where the backward starts.
            args: Further arguments of the engine.
            kwargs: Further arguments of the engine.
        """
        if must_defer(self._recorder.device):
            return original(outputs, *args, **kwargs)
        self._end_step_without_optimizer()
        self._usage.ask_counter(fresh=True)
        keeps_graph = any(args[1:3]) or bool(kwargs.get("keep_graph") or kwargs.get("create_graph"))
        is_larger = self._usage.total_bytes > _with_slack(self._forward_bytes)
        if self._must_end or is_larger or (keeps_graph and not self._keeps_graphs):
            self.end()
            return record(original, outputs, *args, **kwargs)
        self._set_limit(_with_slack(self._peak_bytes))
        try:
            return original(outputs, *args, **kwargs)
        finally:
            self._on_backward_end(keeps_graph=keeps_graph)

    def _on_backward_end(self, *, keeps_graph: bool) -> None:
        self._steps.on_backward_end(keeps_graph=keeps_graph)
        if self.hooks is None or not self.is_on:
            return  # the session was stopped in the backward, or recording has resumed since
        if not keeps_graph:
            self.hooks.end_step()  # the next forward may begin before this step is known to have ended
            self._saves_begin_anew = True
        self._set_limit(_with_slack(self._peak_bytes), refuses=True)
        if self._must_end:
            self.end()
        elif self._saves_nothing and not keeps_graph:
            self._steps.on_graph_freed()

    def _end_step_without_optimizer(self) -> None:
        """End the latest step if a forward has begun since its backward."""
        if self.hooks is not None and self._steps.is_after_backward and self.hooks.num_saved():
            self._steps.on_save()

    def on_optimizer_start(self, *, is_new: bool) -> None:
        """Resume recording if this step may need more than the recorded ones, as the session's first one may.

        Args:
            is_new: Whether the optimizer will make its states now.
        """
        if is_new or not self._steps.has_optimizer:
            self.end(is_larger=False)

    def on_limit(self) -> None:
        """Resume recording: more is allocated than in the recorded steps."""
        if not self.is_on:
            return
        if graph_task_id() == -1 and not is_between_ops(self._recorder.device, self.hooks):
            self._set_limit(0, refuses=True)  # the next allocation calls this again
        else:
            self.end()

    @shielded
    def end(self, *, is_larger: bool = True) -> None:
        """Resume recording.

        Args:
            is_larger: Whether a step may be larger than expected; then the next pause begins later.
        """
        hooks = self.hooks
        if hooks is None or not self.is_on:
            return
        # The engine has dispatch modes of its own, and what is saved outside of a transform must not become a tensor of
        # its inside. While a graph is captured, nothing is recorded anyway.
        if must_defer(self._recorder.device):
            self._must_end = True
            return
        self._end_step_without_optimizer()
        self.is_on = self._saves_begin_anew = False
        self.num_resumed += 1
        self._num_alike = 0
        if is_larger and self._num_needed != _NEVER:
            self._num_needed = min(self._num_needed * _MORE_ALIKE, _MOST_ALIKE)
        self._usage.clear_limit()
        ledger = self._ledger
        for record in list(ledger.records.values()):
            ledger.invalidate(record)  # it may have been written meanwhile
        ledger.recheck_unwatched()
        ledger.sweep()
        insert_mode(self._recorder, self._position)
        self._steps.resume_recording()
        self.adopt()
        self._usage.ask_counter(fresh=True)
        _logger.debug("recording resumes at %s", format_bytes(self._usage.total_bytes))

    def adopt(self) -> int:
        """Pack with the Python hooks, from now on and what native handles hold. Return the number of these handles."""
        assert self.hooks is not None
        self._steps.is_adopting = True
        try:
            with outside_inference_mode():
                return self.hooks.adopt()
        finally:
            self._steps.is_adopting = False

    def waits_for_handles(self, then: Callable[[], object]) -> bool:
        """Return whether a native handle lives; then call `then` once none is left."""
        if self.hooks is None or not self.hooks.num_handles():
            return False
        self.hooks.when_empty(then)
        return True

    def forbid(self) -> None:
        """Record every step from now on; inside a transform, from the end of the running step's forward on."""
        self._num_needed = _NEVER
        self.end()

    def close(self) -> None:
        """Leave everything as it is: the session stops, or is that of a forked child."""
        if self.is_on:
            self.is_on = False
            self._usage.clear_limit()

    def _guard_forward(self) -> None:
        """Set the limit for what comes before the next backward."""
        # Without an optimizer, the program updates its parameters after the backward. Nothing shows when that is over.
        is_updated_by_hand = not self._steps.has_optimizer
        self._set_limit(_with_slack(self._peak_bytes if is_updated_by_hand else self._forward_peak_bytes), refuses=True)

    def _set_limit(self, size_bytes: int, *, refuses: bool = False) -> None:
        """Set the limit, and whether allocations beyond the budget are refused: not in a backward, see the note."""
        budget_bytes = self._room.budget_bytes
        if budget_bytes is not None:
            self._usage.set_limit(size_bytes, budget_bytes if refuses else None, self.on_limit)


def may_pause(config: Config) -> bool:
    """Return whether recording may pause: not where every step has decisions, and an arena places what is recorded."""
    return config.decisions is None and config.decision_class == "saved" and not config.arena


def _with_slack(size_bytes: int) -> int:
    return int(size_bytes * _LARGER) + _SLACK_BYTES


def _are_alike(a_bytes: int, b_bytes: int) -> bool:
    return max(a_bytes, b_bytes) <= _ALIKE * min(a_bytes, b_bytes) + _SLACK_BYTES
