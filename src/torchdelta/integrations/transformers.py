"""MemoryBudgetCallback: a memory budget for transformers' Trainer, and so for TRL's trainers."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from torchdelta.budget import MemoryBudget
from torchdelta.integrations.callback import BudgetCallback, naming_impossible_steps, stop_orphan
from torchdelta.integrations.figures import Figures, planned_time_s
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

__all__ = ["MemoryBudgetCallback"]


class MemoryBudgetCallback(BudgetCallback, TrainerCallback):
    """Keep a Trainer's training within a number of bytes of device memory, with bit-equal results.

    The budget begins in `trainer.train()` after the model and a checkpoint are loaded, and ends with it, evaluations in
    between included. A `MemoryBudget` that runs already on this thread is used as it is, and `limit` is not.

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
        self._begin_training(self.config)
        _advise(args, kwargs.get("model"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure an optimizer step."""
        del args, state, control, kwargs
        self._begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure an optimizer step."""
        del args, state, control, kwargs
        self._end_step()

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


def _ending_budgets(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Trainer.train`, which has no event for an end by an exception: a budget that began in it ends with it.

    Without that the next Trainer would be made inside of that budget, which its model may not fit into.
    """

    @functools.wraps(train)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = MemoryBudget.current()
        try:
            return train(*args, **kwargs)
        except BaseException:
            if MemoryBudget.current() is not before:
                stop_orphan()
            raise

    return wrapper


Trainer.train = _ending_budgets(Trainer.train)
# Not around `train`: inside of that, the search for a batch size catches the error.
_inner_training_loop = Trainer._inner_training_loop  # noqa: SLF001 - `train` runs it once for each size
Trainer._inner_training_loop = naming_impossible_steps()(_inner_training_loop)  # noqa: SLF001


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
        f"{option} takes effect in {where}, even where the memory budget has room. Both work together, but if you turn "
        "the option off, the budget swaps and recomputes only what does not fit"
    )
