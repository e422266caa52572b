"""Records only what a followed step's program replays or moves. See [Note: recording in part] in outline.py.

While this is on, the recorder is off the thread's stack, and the gate (native/gate.py) gives it the ops. See `Phase`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import insert_mode, position_of_mode, remove_mode
from torchdelta.errors import NativeError
from torchdelta.native.gate import new_gate, new_sequence
from torchdelta.runtime.follow.learning import Learning
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.record.between_ops import is_between_ops, must_defer
from torchdelta.runtime.record.garbage_guard import GarbageGuard
from torchdelta.runtime.record.known_backward import KnownBackwards
from torchdelta.runtime.record.native_lane import NativeLane
from torchdelta.runtime.record.partial_conditions import MOST_OTHERS, Phase, is_quiet, load_gate_module, may_begin
from torchdelta.runtime.record.unseen_writes import begins_unseen_writes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.counting import LimitedCounter
    from torchdelta.native.gate import Gate
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.record.backward import Backward
    from torchdelta.runtime.record.known_backward import KnownBackward
    from torchdelta.runtime.record.pause import Pause
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.state.buffer import Buffer

__all__ = ["PartialRecording"]

_logger = logging.getLogger("torchdelta")
_FORGIVEN_AFTER: Final = 4  # steps that were like their outlines, before one that was not is forgotten
_FEWEST_ALIKE: Final = 4  # steps with one backward and one optimizer each, before nothing is recorded between these


class PartialRecording:
    """Which ops of followed steps are recorded. Mutable; one for each session.

    Args:
        recorder: The dispatch mode that records; knows the room, the ledger and the device.
        saved: Its Python hooks; know the follower and the position in the training step.
        backward: Runs the engine.
        pause: Has the native hooks of the session, if there are any.
    """

    def __init__(self, recorder: Recorder, saved: SavedTensors, backward: Backward, pause: Pause) -> None:
        self.num_steps = 0  # that were recorded in part to their ends
        self.num_resumed = 0  # times that recording as a whole had to resume
        self._recorder = recorder
        self._saved = saved
        self._steps = saved.steps
        self._backward = backward
        self._pause = pause
        self._room = recorder.room
        self.garbage = GarbageGuard(recorder.room)
        self._ledger = recorder.ledger
        self._follower = saved.follower
        self._phase = Phase.OFF
        self._gate: Gate | None = None
        self.lane: NativeLane | None = None  # once there is a gate
        self._can_have_gate = True
        self._position = 0  # of the recorder on the stack of dispatch modes
        self._program: Program | None = None  # whose outline is learned or used in this step
        self._learning: Learning | None = None
        self._known = KnownBackwards()
        self._must_end, self._num_alike = False, 0
        self._is_abandoned = False  # whether the outlined step has ended without a backward

    def waits_for_native_handles(self, then: Callable[[], object]) -> bool:
        """Return whether a forward has saved tensors that Python does not count; then call `then` once none is left."""
        is_in_forward = self._phase is Phase.OUTLINED and graph_task_id() == -1 and not self._ledger.is_closing
        return is_in_forward and self._pause.waits_for_handles(then)

    @property
    def is_on(self) -> bool:
        """Whether the gate, and not the stack of dispatch modes, gives the recorder its ops."""
        return self._phase is not Phase.OFF

    # -- between steps

    def on_step_end(self) -> None:
        """Judge the step that has ended. Call this after the follower's `on_step_end`."""
        phase = self._phase
        if phase is Phase.OFF:
            return
        program, learning, ended = self._program, self._learning, self._follower.ended
        is_own = program is not None and ended is not None and ended.program is program and ended.is_exact
        self._stop_learning()
        self._program = None
        if program is not None and learning is not None:
            program.outline = learning.outline(self._steps.last_saved_bytes) if is_own else None
            program.num_others += program.outline is None
            program.forget_times()  # those of steps that were recorded as a whole
        elif program is not None and is_own:
            self.num_steps += 1
            program.num_others -= program.num_others > 0 and self.num_steps % _FORGIVEN_AFTER == 0
            # Where an optimizer does not step after every backward, nothing would tell that a pause should end.
            self._num_alike = self._num_alike + 1 if self._steps.has_stepped else 0
            if not self._steps.has_stepped:
                program.settle()  # so no less will be recorded
        if phase is Phase.PAUSED and not self._steps.has_stepped:
            self._num_alike = 0
            self.garbage.end()
            # The op that saves a tensor is running: on the stack, the recorder would take the rest of its kernel for
            # the whole op. So recording resumes when it is over: see `on_limit`.
            self._set_limit(0)
        elif not is_own:
            self._num_alike = 0

    def begin_if_followed(self) -> None:
        """Record the next step in part if the latest one was followed. Call this between a backward and a forward."""
        if self._phase is not Phase.OFF:
            return
        if self._gate is not None:
            self._gate.close()  # no op is running that was dispatched before recording resumed
        if self._pause.hooks is not None and may_begin(self._recorder, self._follower.ended) and self._has_gate():
            self._begin()

    def on_optimizer_end(self) -> None:
        """Go on with recording after an optimizer's step."""
        if self._phase is Phase.OFF:
            self.begin_if_followed()
        elif graph_task_id() == -1 and (self._must_end or not is_quiet(self._recorder)):  # not inside a backward
            self.end("a step is recorded as a whole")
        elif self._phase is Phase.PAUSED:
            self.garbage.end()
            self._record_whole()

    def _has_gate(self) -> bool:
        """Return whether there is a gate. Its module may still be built on another thread."""
        if self._gate is None and self._can_have_gate:
            module = load_gate_module()
            if isinstance(module, NativeError):
                self._can_have_gate = False
                _logger.debug("followed steps are recorded as a whole: %s", module)
            elif module is not None:
                counter, recorder = cast("LimitedCounter", self._room.usage.counter), self._recorder
                asked = (self._on_other_op, self._make_room, begins_unseen_writes(recorder))
                self._gate = new_gate(recorder, recorder.device.device, counter, *asked)
                self.lane = NativeLane(*self._parts(), self._follower, lambda: self._hand_over("a replay failed"))
                self._backward.python_writes.before_write = self.lane.before_write
        return self._gate is not None

    @shielded
    def _begin(self) -> None:
        self._parts()[0].forget()
        self._position = position_of_mode(self._recorder)
        remove_mode(self._recorder)
        self._must_end, self._num_alike = False, 0
        self._follower.on_begin, self._follower.on_abandon = self._on_begin, self._on_abandoned
        self._follower.before_begin = self._begin_anew  # an op may save a tensor before it runs
        self._record_whole()

    def _parts(self) -> tuple[Gate, NativeHooks]:
        assert self._gate is not None
        assert self._pause.hooks is not None
        return self._gate, self._pause.hooks

    def _adopt(self) -> int:
        num_adopted = self._pause.adopt()
        if self.lane is not None:
            self.lane.on_adopted()
        return num_adopted  # saved tensors that native code held

    def _record_whole(self) -> None:
        self._phase = Phase.WHOLE
        self._parts()[0].record()

    # -- a step

    def _on_begin(self, program: Program, buffer: Buffer) -> None:
        """Learn or use the outline of a program: the first tensor of a step is being saved."""
        gate, hooks = self._parts()
        may = self._phase is Phase.WHOLE and program.num_others < MOST_OTHERS and is_quiet(self._recorder)
        if not may or not program.has_held:  # to make room beyond it, all buffers must be known
            return
        self._program, self._is_abandoned = program, False
        self._known.begin(self._recorder.forward_hash)
        outline = program.outline
        if outline is None:
            self._phase = Phase.LEARNING
            self._learning = Learning(program, gate, hooks, buffer)
            self._recorder.learning = self._follower.learning = self._learning
            self._recorder.restorer.replayer.on_replay = self._learning.on_replay
            gate.learn()
        else:
            self._phase = Phase.OUTLINED
            most_bytes = self._room.begin_counting()
            gate.follow(outline.ops, most_bytes)
            hooks.compare(outline.saves, self._on_other_save, self._pack_numbered)
            if self.lane is not None and self._known.has_any(program):
                self.lane.begin(program, most_bytes)

    @shielded
    def _pack_numbered(self, tensor: Any, number: int) -> Any:
        self._parts()[0].know(tensor)
        self._follower.number = number
        try:
            return self._saved.pack(tensor)
        finally:
            self._follower.number = -1

    @shielded
    def _on_other_save(self, index: int) -> None:
        self._leave_outline(f"it saved other tensors: from tensor {index} of its outline on")

    @shielded
    def _on_other_op(self, position: int) -> None:
        if self._is_abandoned:
            self._begin_anew()
        else:
            self._leave_outline(f"it ran other ops: from op {position} of its outline on")

    def _begin_anew(self) -> None:
        if self._is_abandoned and self.lane is not None:
            self.lane.abandon()
            self._stop_learning()
            self._program, self._is_abandoned = None, False
            self._record_whole()

    @shielded
    def _make_room(self, need_bytes: int) -> None:
        if not self._room.wait_for(need_bytes):  # for copies out, as the program does
            self._leave_outline("the budget has no room for an op")

    def _leave_outline(self, why: str) -> None:
        if self._phase is Phase.OUTLINED and self._program is not None and not self._must_end:
            self._program.num_others += 1
        self.end(why)

    def find_more(self) -> bool:
        """Let all that this step has saved leave: the budget is short. Return whether that is more than before.

        Recording as a whole resumes before the next op: a survey may begin, and it has to see them all.
        """
        hooks, gate = self._pause.hooks, self._gate
        if self._phase in (Phase.OFF, Phase.PAUSED) or hooks is None or gate is None:
            return False
        if graph_task_id() == -1:
            gate.follow(new_sequence([], [], []), 0)  # the next op is another one
        else:
            self._must_end = True
        if self._phase is not Phase.OUTLINED:
            return False
        self._follower.leave_outlined("the budget was short")
        return self._adopt() > 0

    def leave_tape(self) -> None:
        """Let Python take over from the native tape: something happens that it does not know of."""
        if self.lane is not None and self.lane.is_on:
            self.find_more()

    def on_limit(self) -> None:
        """Resume recording: the budget is passed before the optimizer has stepped, or it does not step."""
        if self._phase is not Phase.PAUSED:
            return
        if not is_between_ops(self._recorder.device, self._pause.hooks):
            self._set_limit(0)  # the next allocation calls this again
        elif limit_bytes := self.garbage.next_limit_bytes():
            self._set_limit(limit_bytes)
        else:
            self.end("the budget was passed, or the optimizer did not step")

    def _on_abandoned(self) -> None:
        """Begin the step anew with the next op or saved tensor: all that it has saved is gone, without a backward."""
        self._is_abandoned = self._phase in (Phase.OUTLINED, Phase.LEARNING)
        if self._phase is Phase.OUTLINED and self.lane is not None:
            self.lane.end_comparison()

    # -- backward

    def run_backward(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward: that of a followed step, if this one was like its outline."""
        gate, hooks = self._parts()
        if must_defer(self._recorder.device):
            return self._backward.run_nested(original, outputs, *args, **kwargs)
        if self._phase is Phase.PAUSED:
            self.end("a second backward begins")
            return self._backward.run(original, outputs, *args, **kwargs)
        known: KnownBackward | None = None
        if self._phase is Phase.OUTLINED and self._program is not None and self._program.outline is not None:
            if not (hooks.end_comparison() and gate.is_complete()) or self._is_abandoned:
                self._leave_outline("its backward began early")
                return self._backward.run(original, outputs, *args, **kwargs)
            self._room.transfers.reap()
            self._follower.complete_outlined()
            self._steps.outlined_bytes = self._program.outline.saved_bytes
            known = self._known.find(self._program, outputs)
        elif self._learning is not None:
            self._learning.on_forward_end()
            self._recorder.learning = self._follower.learning = None
        gate.close()
        try:
            # The graph is freed, and every leaf gets its gradient.
            is_usual = not any(args[1:]) and kwargs.get("accumulate_grad", False)
            is_known = known is not None and is_usual and self._backward.runs_known(known)
            if self.lane is not None and self.lane.is_on and not (self.lane.end_forward() and is_known):
                self._hand_over("its backward is not known")
                is_known = False
            if known is not None and is_known:
                return self._backward.run_known(original, known, outputs, *args, **kwargs)
            return self._backward.run(original, outputs, *args, **kwargs)
        except BaseException:
            self._must_end = True
            raise
        finally:
            self._on_backward_end(hooks)

    @shielded
    def _hand_over(self, why: str) -> None:
        with self._recorder.device.locked():
            self._follower.leave_outlined(why)
            self._adopt()

    @shielded
    def _on_backward_end(self, hooks: NativeHooks) -> None:
        """Go on with recording, or pause it until the optimizer has stepped."""
        if self.lane is not None and self.lane.is_on:
            if hooks.num_handles():
                self._hand_over("saved tensors outlive its backward")
            self.lane.end()
        if not self._ledger.num_handles and self._gate is not None:
            self._gate.forget()  # nothing recorded is replayed any more
        lives_on = self._must_end or self._ledger.num_handles or hooks.num_handles() or self._ledger.surveys
        if self._phase is Phase.OUTLINED and self._program is not None and not lives_on:
            self._known.note(self._program, self._backward.latest_known)
            self._ledger.cut()
            self._room.forget()
            if self._num_alike >= _FEWEST_ALIKE:
                self._phase = Phase.PAUSED
                self._program.settle()
                self._set_limit(self.garbage.begin())
                return
        if self._must_end or self._ledger.surveys:
            self.end("its backward was unusual")
        elif self.is_on:
            self._record_whole()

    @shielded
    def end(self, why: str) -> None:
        """Record every op again: from now on, or once a running backward, transform or graph capture has ended."""
        if self._phase is Phase.OFF:
            return
        if must_defer(self._recorder.device):
            # The native tape may copy what is about to be written, which must not become part of a captured graph.
            if self._recorder.device.is_off() and self.lane is not None and self.lane.is_on:
                self._hand_over(why)
            self._must_end = True
            return
        _logger.debug("steps are recorded as a whole again: %s", why)
        if self._phase is Phase.OUTLINED:
            self._follower.leave_outlined(why)
        elif self._phase is Phase.PAUSED:
            self.garbage.end()
            self._ledger.recheck_unwatched()
            self._ledger.sweep()
        self.num_resumed += 1
        self._stop()
        insert_mode(self._recorder, self._position)
        self._parts()[0].end()
        self._adopt()
        self._room.usage.ask_counter(fresh=True)

    def close(self) -> None:
        """Leave everything as it is: the session stops, or is that of a forked child."""
        if self._gate is not None:
            self._gate.close()
        if self._phase is Phase.PAUSED:
            self.garbage.end()
        self._stop()
        self.forget_leaves()
        self._backward.headroom.clear()

    def forget_leaves(self) -> None:
        """Hold no weak reference to a leaf: two tensors are about to be exchanged, or may be later."""
        self._backward.latest_known = None
        self._known.forget()

    def _stop(self) -> None:
        self._phase = Phase.OFF
        self._program, self._is_abandoned = None, False
        self._follower.before_begin = self._follower.on_begin = self._follower.on_abandon = None
        self._stop_learning()

    def _stop_learning(self) -> None:
        self._learning = None
        self._recorder.learning = self._follower.learning = None
        self._recorder.restorer.replayer.on_replay = None

    def _set_limit(self, limit_bytes: int) -> None:
        self._room.usage.set_limit(limit_bytes, self._room.budget_bytes, self.on_limit)
