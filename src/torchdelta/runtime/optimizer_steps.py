"""Acts before and after each optimizer's step: makes room for its first states, and ends the step of the scope.

[Note: closures]
`optimizer.step(closure)` runs the forward and the backward of the step after the hook that torch calls before it. The
memory of the step and the parameters that will have gradients are not known there. So the hook passes on a closure that
does what the hook does without one, right after the program's closure has returned. The states are then not made yet,
so a budget that cannot hold them is refused before the optimizer has changed anything.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchdelta._torch.modes import without_mode
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.survey.absent import Absent, may_any_leave
from torchdelta.runtime.survey.everything import too_large_bytes
from torchdelta.runtime.survey.first_step import FORESEEN, first_step_bytes
from torchdelta.runtime.survey.whole_run import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.record.partial import PartialRecording
    from torchdelta.runtime.record.pause import Pause
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.state.steps import StepTracker

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerSteps:
    """The hooks of one session on the steps of all optimizers.

    Args:
        is_running: Returns whether the session runs on this thread.
        end_survey: Raises the `BudgetError` of a survey that runs, since an optimizer is about to step.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: StepTracker,
        pause: Pause,
        partial: PartialRecording,
        *,
        is_running: Callable[[], bool],
        end_survey: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._room = recorder.room
        self._steps = steps
        self._pause = pause
        self._partial = partial
        self._is_running = is_running
        self._end_survey = end_survey
        self._hooks: list[Any] = []
        # In the class *all*: the largest parameter that an optimizer has stepped.
        self._stepped_bytes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._foreseen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # room was made for their states

    def start(self) -> None:
        """Install the hooks."""
        self._hooks.append(register_optimizer_step_pre_hook(self._before))
        self._hooks.append(register_optimizer_step_post_hook(self._after))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @shielded
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self._is_running():
            return None
        self._end_survey()
        is_new = self._is_new(optimizer)
        self._pause.on_optimizer_start(is_new=is_new)
        self._partial.garbage.before_optimizer()
        if self._room.persistents is not None:
            self._room.persistents.candidates.note_optimizer(optimizer)
        self._steps.on_optimizer_start()
        has_arguments = any(argument is not None for argument in args[1:]) or kwargs.get("closure") is not None
        if is_new or has_arguments:
            self._partial.end("an optimizer's first step, or a closure")
        with_closure = self._with_closure(optimizer, args, kwargs)
        if with_closure is None and is_new:
            self._make_room(optimizer, makes_gradients=has_arguments)
        if with_closure is None:
            self._refuse_too_large(optimizer)
        return with_closure

    @shielded
    def _after(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._is_running():
            self._steps.on_optimizer_end()
            self._pause.on_optimizer_end()
            self._partial.on_optimizer_end()
            self._recorder.ledger.cut_unread()

    def _is_new(self, optimizer: Any) -> bool:
        """Return whether an optimizer will make states for which no room was made."""
        return optimizer not in self._foreseen and not optimizer.state and self._room.persistents is None

    def _make_room(self, optimizer: Any, *, makes_gradients: bool) -> None:
        """Make room for all that the first step of an optimizer allocates."""
        if self._room.budget_bytes is None:
            return
        with without_mode(self._recorder):
            size_bytes = first_step_bytes(optimizer, makes_gradients=makes_gradients)
        if size_bytes:
            self._make(size_bytes, optimizer)
        self._foreseen.add(optimizer)  # a step that was refused is looked at again

    def _make(self, size_bytes: int, optimizer: Any) -> None:
        """Make room for an optimizer's step, without raising what prefetching leaves free for the largest op."""
        largest_bytes = self._room.largest_request_bytes
        try:
            self._room.make(size_bytes, f"{FORESEEN}{type(optimizer).__name__}")
        finally:
            self._room.largest_request_bytes = largest_bytes

    def _refuse_too_large(self, optimizer: Any) -> None:
        """In the class *all*, refuse a step of which an op cannot fit before it has stepped any parameter."""
        persistents, ledger = self._room.persistents, self._recorder.ledger
        if persistents is None or ledger.surveys or not may_any_leave():
            return
        if persistents.compiled.may_read(None):  # compiled code runs: after a trial, Dynamo runs the step eagerly
            return
        stepped = [
            parameter
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None and parameter.device == ledger.device
        ]
        largest_bytes = max((parameter.nbytes for parameter in stepped), default=0)
        if largest_bytes <= self._stepped_bytes.get(optimizer, 0):
            return
        with without_mode(self._recorder):
            size_bytes = too_large_bytes(
                optimizer, stepped, self._room, lambda: Absent(ledger, persistents, self._room.transfers)
            )
        if size_bytes:
            self._make(size_bytes, optimizer)
        self._stepped_bytes[optimizer] = largest_bytes

    def _with_closure(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Return the arguments of a step with a closure that tells us when it has returned; None without a closure.

        See [Note: closures].
        """
        if _is_closure(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._watched(optimizer, kwargs["closure"])}
        if len(args) > 1 and _is_closure(args[1]):
            return (args[0], self._watched(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _watched(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._before_closure()
            loss = closure(*args, **kwargs)
            self._after_closure(optimizer)
            return loss

        return watched

    @shielded
    def _before_closure(self) -> None:
        if self._is_running():
            self._steps.on_closure_start()

    @shielded
    def _after_closure(self, optimizer: Any) -> None:
        if self._is_running():
            self._end_survey()
            self._steps.on_closure_end()
            if self._is_new(optimizer):
                self._make_room(optimizer, makes_gradients=False)
            self._refuse_too_large(optimizer)


def _is_closure(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, torch.nn.Module)
