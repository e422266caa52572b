"""Records followed steps in part: only what their program replays or moves. See [Note: recording in part] in outline.py.

Between the optimizer's step and the backward, the recorder is off the thread's stack and the gate (native/gate.py) is on:

1. Before the first saved tensor of a step the gate has every op recorded, or, once steps come out alike, none.
2. At that tensor a program is chosen by its size. If there is none that fits, recording resumes at once.
3. A program without an outline has every op and saved tensor recorded, which teaches it. One with an outline has those
   recorded that it needs. Where the step differs, or the budget has no room, recording resumes before the op that differs.
4. A backward begins as in any followed step. Until the optimizer has stepped, nothing is recorded: the tape is cut, so
   no replay can read what is written meanwhile. If the graph lives on, recording resumes.

This needs the counter at the allocator and the native hooks; without them followed steps are recorded as a whole.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, cast

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import insert_mode, position_of_mode, remove_mode
from torchdelta._torch.tensors import is_transforming
from torchdelta.errors import NativeError
from torchdelta.native.gate import gate_is_built, load_gate, new_gate
from torchdelta.runtime.follow.outline import Learning
from torchdelta.runtime.interrupts import is_in_section, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.counting import LimitedCounter
    from torchdelta.native.gate import Gate
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.runtime.follow.outline import Outline
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.record.backward import Backward
    from torchdelta.runtime.record.headroom import KnownBackward
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["PartialRecording"]

_logger = logging.getLogger("torchdelta")

_MOST_OTHERS: Final = 3  # steps that were not like the outline of their program, before it is given up
_FEWEST_ALIKE: Final = 4  # steps that are recorded in part one after another, before nothing is recorded at their start
_SLACK_SHARE: Final = 0.01  # of the budget: how much more memory a step may use at its start than the ones before
_NO_LIMIT: Final = (1 << 63) - 1


class PartialRecording:
    """Which ops of followed steps are recorded. Mutable; one for each session.

    Args:
        recorder: The dispatch mode that records; knows the room, the ledger and the device.
        saved: Its Python hooks; know the follower.
        steps: The position in the training step.
        backward: Runs the engine.
    """

    def __init__(self, recorder: Recorder, saved: SavedTensors, steps: StepTracker, backward: Backward) -> None:
        self.is_on = False
        self.hooks: NativeHooks | None = None  # of the session, if they are native
        self.num_steps = 0  # that were recorded in part to their ends
        self.num_ended = 0  # times that recording had to resume
        self._recorder = recorder
        self._saved = saved
        self._steps = steps
        self._backward = backward
        self._known: weakref.WeakKeyDictionary[Program, KnownBackward] = weakref.WeakKeyDictionary()
        self._room = recorder.room
        self._ledger = recorder.ledger
        self._follower = saved.follower
        self._gate: Gate | None = None
        self._why_no_gate: NativeError | None = None
        self._builder: threading.Thread | None = None
        self._position = 0  # of the recorder on the stack of dispatch modes
        self._running: Outline | None = None  # of the step that is under way
        self._program: Program | None = None  # whose outline it is
        self._learning: Learning | None = None
        self._must_end = False
        self._records_start = True  # whether ops before the first saved tensor are recorded
        self._num_alike = 0
        self._start_bytes = 0  # the most bytes in use before the first saved tensor of the latest steps

    # -- between steps

    def on_optimizer_end(self) -> None:
        """Record the next step in part, if that is expected to do."""
        if self.is_on:
            self._go_on()
        elif self._may_begin() and self._has_gate():
            self._begin()

    def _is_quiet(self) -> bool:
        """Return whether the recorder may be taken off the stack, or stay off it."""
        recorder, ledger = self._recorder, self._ledger
        return (
            ledger.num_handles == 0
            and not ledger.surveys
            and not self._steps.is_after_backward
            and not ledger.observing.observer.wants_every_op
            and not recorder.only_counts
            and not recorder.subclasses.were_met
            and graph_task_id() == -1
        )

    def _may_begin(self) -> bool:
        ended = self._follower.ended
        return (
            self.hooks is not None
            and self._why_no_gate is None
            and ended is not None
            and ended.program is not None
            and ended.program.num_others < _MOST_OTHERS
            and ended.is_exact
            and not ended.was_watched
            and self._is_quiet()
            and self._recorder.persistents is None
            and threading.current_thread() is threading.main_thread()
            and position_of_mode(self._recorder) != -1
        )

    def _has_gate(self) -> bool:
        """Return whether there is a gate. Build its module on another thread if needed: that takes half a minute."""
        if self._gate is not None:
            return True
        if not gate_is_built():
            if self._builder is None:
                self._builder = threading.Thread(target=load_gate, name="torchdelta-build", daemon=True)
                self._builder.start()
            if self._builder.is_alive():
                return False
        module = load_gate()
        if isinstance(module, NativeError):
            self._why_no_gate = module
            _logger.debug("followed steps are recorded as a whole: %s", module)
            return False
        counter = cast("LimitedCounter", self._room.usage.counter)
        self._gate = new_gate(self._recorder, counter, self._on_other_op, self._make_room)
        return True

    @shielded
    def _begin(self) -> None:
        assert self.hooks is not None and self._gate is not None
        self._position = position_of_mode(self._recorder)
        remove_mode(self._recorder)
        self.is_on = True
        self._must_end = False
        self._num_alike = 0
        self._records_start = True
        self.hooks.record_partly(self._on_first_save, self._on_other_save, self._pack_numbered)
        self._gate.record()
        _logger.debug("steps are recorded in part from now on")

    @shielded
    def _go_on(self) -> None:
        """Judge the step that has ended, and wait for the next one."""
        assert self._gate is not None and self.hooks is not None
        self._clear_limit()
        learning, program = self._learning, self._program
        ended = self._follower.ended
        is_own = ended is not None and ended.program is program and ended.is_exact and not ended.had_abandoned
        if learning is not None:
            self._stop_learning()
            outline = learning.outline() if is_own else None
            if program is not None:
                program.outline = outline
                program.num_others += outline is None
                program.step_times_s.clear()  # those of steps that were recorded as a whole
                program.first_s = 0.0
        elif self._running is not None and is_own:
            self.num_steps += 1
            self._num_alike += 1
        self._running = self._program = None
        if self._must_end or not self._is_quiet():
            self.end("a step is recorded as a whole")
            return
        self._records_start = self._num_alike < _FEWEST_ALIKE or (program is not None and _reads_start(program))
        if self._records_start:
            self._gate.record()
        else:
            slack_bytes = int(_SLACK_SHARE * (self._room.budget_bytes or 0))
            self._gate.idle(self._start_bytes + slack_bytes)

    # -- a step

    @shielded
    def _on_first_save(self, size_bytes: int) -> object | None:
        """Choose a program at the first saved tensor of a step. Return what its steps save, or None."""
        gate, room, follower = self._gate, self._room, self._follower
        assert gate is not None
        if graph_task_id() != -1 or is_transforming():
            self._must_end = True
            return None
        self._steps.on_save()  # the last step may have had no optimizer
        room.usage.ask_counter()
        self._start_bytes = max(gate.highest_bytes, self._start_bytes if self._num_alike else 0)
        program = self._expected(size_bytes, room.usage.total_bytes)
        if program is None or self._must_end or self._ledger.observing.observer.wants_every_op or self._ledger.surveys:
            self.end("another kind of step begins")
            return None
        self._program = program
        if program.outline is None:
            self._learning = Learning(program, gate, cast("NativeHooks", self.hooks))
            self._recorder.learning = follower.learning = self._learning
            self._recorder.restorer.replayer.on_replay = self._learning.on_replay
            gate.learn()
            return None
        self._running = program.outline
        follower.begin_outlined(program)
        gate.follow(program.outline.ops, room.budget_bytes or _NO_LIMIT)
        return program.outline.saves

    def _expected(self, size_bytes: int, start_bytes: int) -> Program | None:
        """Return the program that a step is expected to follow: the one that served last of those that may."""
        programs = self._follower.programs
        found: Program | None = None
        for program in programs:
            outline = program.outline
            if outline is None or program.num_others >= _MOST_OTHERS or outline.first_bytes != size_bytes:
                continue
            if programs.covers(program.start_bytes, start_bytes):
                found = program
        if found is not None:
            return found
        ended = self._follower.ended
        program = ended.program if ended is not None and ended.is_exact else None
        can_learn = program is not None and program.outline is None and self._records_start
        return program if program is not None and can_learn and program.num_others < _MOST_OTHERS else None

    @shielded
    def _pack_numbered(self, tensor: Any, number: int) -> Any:
        """Pack a saved tensor that leaves, or at which something is due."""
        follower = self._follower
        follower.number = number
        try:
            return self._saved.pack(tensor)
        finally:
            follower.number = -1

    @shielded
    def _on_other_save(self, index: int) -> None:
        """Resume recording: the step saves another tensor than its outline has."""
        self._leave(f"it saved other tensors: from tensor {index} on")

    @shielded
    def _on_other_op(self, position: int) -> None:
        """Resume recording: the next op is not that of the outline, or uses more memory at the start of a step."""
        if position < 0:
            self.end("more memory is in use than at the start of other steps")
        else:
            self._leave(f"it ran another op: number {position}")

    @shielded
    def _make_room(self, need_bytes: int) -> None:
        """Wait for copies out, as the program does; resume recording if that is not enough."""
        if not self._room.wait_for(need_bytes):
            self._leave("the budget has no room for an op")

    def _leave(self, why: str) -> None:
        if self._program is not None and self._running is not None:
            self._program.num_others += 1
        self.end(why)

    def on_limit(self) -> None:
        """Resume recording: more is allocated than the budget between a backward and the next step."""
        if not self.is_on:
            return
        if graph_task_id() != -1:
            self._must_end = True
        elif is_in_section() or is_transforming():
            self._set_limit(0)  # the next allocation calls this again
        else:
            self.end("the budget is used up")

    # -- backward

    def run_backward(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward: that of a followed step, if this one was like its outline."""
        gate, hooks = self._gate, self.hooks
        assert gate is not None and hooks is not None
        if graph_task_id() != -1 or is_transforming():
            self._must_end = True
            return original(outputs, *args, **kwargs)
        backward, known = self._backward, None
        if self._running is not None and self._program is not None:
            if not (gate.is_complete() and hooks.is_complete()):
                self._leave("its backward began early")
                return backward.run(original, outputs, *args, **kwargs)
            self._follower.complete_outlined()
            known = self._known.get(self._program)
        elif self._learning is not None:
            self._learning.on_forward_end()
        gate.close()
        try:
            is_usual = not any(args[1:]) and kwargs.get("accumulate_grad", False)  # the graph goes, all leaves get theirs
            if known is not None and is_usual and backward.runs_known(known):
                return backward.run_known(original, outputs, *args, **kwargs)
            return backward.run(original, outputs, *args, **kwargs)
        except BaseException:
            self._must_end = True
            raise
        finally:
            self._on_backward_end(hooks)

    @shielded
    def _on_backward_end(self, hooks: NativeHooks) -> None:
        if not self.is_on:
            return
        if self._must_end or self._ledger.num_handles or hooks.num_handles() or self._ledger.surveys:
            self.end("its graph lives on, or its backward was unusual")
            return
        if self._running is not None and self._program is not None and self._backward.latest_known is not None:
            self._known[self._program] = self._backward.latest_known
        self._ledger.cut()
        self._room.forget()
        hooks.await_step()
        self._set_limit(self._room.budget_bytes or _NO_LIMIT)

    def before_optimizer(self, *, is_new: bool) -> None:
        """Resume recording if the optimizer's writes have to be recorded, or its first step is to be foreseen."""
        if not self.is_on:
            return
        if is_new or self._ledger.num_handles or cast("NativeHooks", self.hooks).num_handles():
            self.end("an optimizer steps")

    # -- the end

    @shielded
    def end(self, why: str = "") -> None:
        """Resume recording; from where the step is, or from the end of the running backward or transform on."""
        if not self.is_on:
            return
        if graph_task_id() != -1 or is_transforming():
            self._must_end = True
            return
        _logger.debug("steps are recorded as a whole again: %s", why)
        self.is_on = False
        self.num_ended += 1
        self._clear_limit()
        if self._running is not None:
            self._follower.leave_outlined(why)
        self._stop_learning()
        self._running = self._program = None
        gate, hooks = self._gate, self.hooks
        assert gate is not None and hooks is not None
        self._ledger.recheck_unwatched()
        self._ledger.sweep()
        insert_mode(self._recorder, self._position)
        gate.end()
        hooks.adopt()
        self._room.usage.ask_counter(fresh=True)

    def forget_leaves(self) -> None:
        """Hold no weak reference to a leaf: two tensors are about to be exchanged."""
        self._backward.latest_known = None
        self._known.clear()

    def close(self) -> None:
        """Leave everything as it is: the session stops, or is that of a forked child."""
        if self._gate is not None:
            self._gate.close()
        if self.is_on:
            self.is_on = False
            self._stop_learning()
            self._clear_limit()

    def _stop_learning(self) -> None:
        self._learning = None
        self._recorder.learning = self._follower.learning = None
        self._recorder.restorer.replayer.on_replay = None

    def _set_limit(self, limit_bytes: int) -> None:
        counter = cast("LimitedCounter", self._room.usage.counter)
        counter.set_limit(limit_bytes, _NO_LIMIT, self.on_limit)

    def _clear_limit(self) -> None:
        if self._room.usage.counter is not None:
            cast("LimitedCounter", self._room.usage.counter).clear_limit()


def _reads_start(program: Program) -> bool:
    return program.outline is None or program.outline.reads_start
