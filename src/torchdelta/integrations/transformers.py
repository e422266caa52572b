"""MemoryBudgetCallback: a memory budget for transformers' Trainer, and so for TRL's trainers."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from torchdelta.budget import MemoryBudget
from torchdelta.integrations.figures import Figures, planned_time_s
from torchdelta.notices import warn_once
from torchdelta.runtime.errors import BudgetError
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

    from torchdelta.config import Config
    from torchdelta.plan.model import Plan
    from torchdelta.summary import Totals

__all__ = ["MemoryBudgetCallback"]

_logger = logging.getLogger("torchdelta")

# Budgets that a callback started. The Trainer has no event for the end of a training by an exception, so this module
# wraps `Trainer.train`. A budget that still runs when another training begins is of a training without that method.
_started: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()


class MemoryBudgetCallback(TrainerCallback):
    """Keep a Trainer's training within a number of bytes of device memory, with bit-equal results.

    The budget runs from the begin of `trainer.train()` to its end, evaluations in between included. A `MemoryBudget`
    that runs already on this thread is used as it is, and `limit` is not.

    To each training log of the Trainer it adds, so that `log_history`, TensorBoard and the others have them:

    - `torchdelta/peak_gib`: most GiB of tensors at once;
    - `torchdelta/slowdown`: time of the steps against the time of the model's own ops in them, an estimate of a plain
      step. What Python does between ops is not in that estimate, so for a small model the plain step is slower;
    - `torchdelta/stall_ms`: milliseconds a step that the training waited for swapped tensors;
    - `torchdelta/recompute_ms`: milliseconds a step spent on computing tensors again;
    - `torchdelta/swapped_gib`: GiB a step that were swapped out.

    They are of the steps since the last log, and in the last log (the one with `train_runtime`) of the whole training.
    A step is one optimizer step, with all micro-batches of gradient accumulation.

    Args:
        limit: The budget, as `MemoryBudget` takes it: "8GiB", "80%", "auto", or an int of bytes.
        config: Options; the default is right for most.
        plan: A plan to follow, from `torchdelta plan`: the path of its file, or a `Plan`.

    Attributes:
        budget: The budget of the latest training, for `callback.budget.summary()`; None before the first one.

    Raises:
        SizeError: `limit` cannot be parsed.
        BudgetError: (in `trainer.train()`) The step does not fit, whatever is evicted. With
            `TrainingArguments(auto_find_batch_size=True)` the Trainer then tries a smaller batch.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryBudgetCallback("8GiB")])
        ... # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        limit: int | str,
        config: Config | None = None,
        plan: str | os.PathLike[str] | Plan | None = None,
    ) -> None:
        super().__init__()
        if not (isinstance(limit, str) and limit.strip().lower() == "auto"):
            # The budget is made when training begins: a percentage initializes CUDA, and only the Trainer chooses the
            # device. What cannot be parsed is refused here.
            parse_size(limit, total_bytes=2**50, name="limit")
        self.limit = limit
        self.config = config
        self.plan = plan
        self.budget: MemoryBudget | None = None
        self._is_ours = False
        self._forget_figures()

    def stop(self) -> None:
        """Stop the budget that this callback started, if it still runs."""
        budget = self.budget
        if self._is_ours and budget is not None and MemoryBudget.current() is budget:
            budget.stop()
        self._is_ours = False

    # -- events of the Trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the first place among the callbacks."""
        del args, state, control, kwargs
        self._go_first()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the budget."""
        del state, control
        self._go_first()  # it was not there at `on_init_end` if it came by `trainer.add_callback`
        _stop_orphan()
        self._is_ours = False
        running = MemoryBudget.current()
        if running is None:
            self.budget = MemoryBudget(self.limit, self.config, plan=self.plan)
            self._start()
        else:
            self.budget = running
            self._forget_figures(first_step=running.totals().num_steps)
            _logger.info(
                "MemoryBudgetCallback(%r): a budget of %s runs already and is used instead",
                self.limit,
                format_bytes(running.budget_bytes),
            )
        _advise(args, kwargs.get("model"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure an optimizer step."""
        del args, state, control, kwargs
        if self._is_ours and MemoryBudget.current() is not self.budget:
            # Another Trainer trained inside of this one, for instance in an evaluation, and its callback stopped ours.
            _stop_orphan()
            self._start()
        if self.budget is not None:
            self._at_step_begin = (time.perf_counter(), self.budget.totals())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure an optimizer step."""
        del args, state, control, kwargs
        if self.budget is None or self._at_step_begin is None:
            return
        start_s, before = self._at_step_begin
        time_s = time.perf_counter() - start_s
        after = self.budget.totals()
        summaries = self.budget.steps_since(self._next_step)
        self._next_step = after.num_steps
        for figures in (self._since_log, self._of_training):
            figures.add(time_s, before, after, summaries)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to the log of a training step, and to that of the whole training."""
        del args, control, kwargs
        if logs is None or self.budget is None:
            return
        if "loss" in logs:
            figures = self._since_log
        elif "train_runtime" in logs:
            figures = self._of_training
        else:  # of an evaluation
            return
        values = figures.values(planned_time_s(self.budget))
        self._since_log = Figures()
        logs.update(values)
        if state.log_history:  # has a copy of the log already
            state.log_history[-1].update(values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the budget if this callback started it."""
        del args, state, control, kwargs
        self.stop()

    # -- inside

    def _start(self) -> None:
        assert self.budget is not None
        self.budget.start()
        self._is_ours = True
        _started.add(self.budget)
        self._forget_figures()

    def _forget_figures(self, first_step: int = 0) -> None:
        self._next_step = first_step  # index of the first of the budget's steps that was not measured yet
        self._at_step_begin: tuple[float, Totals] | None = None
        self._since_log = Figures()
        self._of_training = Figures()

    def _go_first(self) -> None:
        """Move this callback before the loggers, which the Trainer puts before the callbacks of the user.

        Each callback gets the same dict of a log, in turn: TensorBoard's would not see what a later one adds. Events do
        not pass the Trainer, so its list of callbacks is looked up where the event comes from.
        """
        frame = sys._getframe()
        while frame is not None:
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler):
                others = [each for each in handler.callbacks if each is not self]
                handler.callbacks = [self, *others]  # a new list: the handler is iterating over the old one
                return
            frame = frame.f_back


def _stop_orphan() -> None:
    """Stop the budget that runs on this thread if a callback started it: its training ended in an exception."""
    running = MemoryBudget.current()
    if running is not None and running in _started:
        with contextlib.suppress(BudgetError):  # that training has raised its own error
            running.stop()


def _ending_budgets(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Trainer.train`: a budget that began in it ends with it, by an exception, too.

    Without that the next Trainer would be made inside of that budget, which its model may not fit into.
    """

    @functools.wraps(train)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = MemoryBudget.current()
        try:
            return train(*args, **kwargs)
        except BaseException:
            if MemoryBudget.current() is not before:
                _stop_orphan()
            raise

    return wrapper


Trainer.train = _ending_budgets(Trainer.train)


def _advise(args: TrainingArguments, model: Any) -> None:
    """Say once if activations are checkpointed or offloaded beside the budget, and what is better."""
    where = "all layers"
    checkpoints = getattr(args, "activation_checkpointing", False)
    kwargs = getattr(args, "activation_checkpointing_kwargs", None) or {} if checkpoints else {}
    if kwargs.get("every_n_layers", 1) > 1:
        where = "all of its layers"
    if getattr(args, "activation_offloading", False):
        option = "activation_offloading=True"
    elif kwargs.get("offload"):
        option = 'activation_checkpointing_kwargs={"offload": True}'
    elif checkpoints or getattr(model, "is_activation_checkpointing", False):
        option = "activation_checkpointing=True"
    elif getattr(args, "gradient_checkpointing", False):  # its name before transformers 5.17, and still TRL's
        option = "gradient_checkpointing=True"
    else:
        return
    warn_once(
        f"{option} takes effect in {where}, also where the memory budget has room. It works together with the "
        "budget, but without it the budget chooses what to swap and recompute, and does neither without need"
    )
