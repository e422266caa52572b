"""MemoryBudgetCallback: a memory budget for Lightning's Trainer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from torchdelta.errors import ConfigError
from torchdelta.host import declare_processes_here
from torchdelta.integrations.callback import BudgetCallback, naming_impossible_steps
from torchdelta.integrations.figures import Figures, planned_time_s
from torchdelta.runtime import interrupts
from torchdelta.runtime.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning.pytorch import LightningModule, Trainer


__all__ = ["MemoryBudgetCallback"]


class MemoryBudgetCallback(BudgetCallback, Callback):
    """Keep `trainer.fit` within a number of bytes of device memory, with bit-equal results.

    The budget runs in each process that trains, from before the model is moved to its device to the end of `fit`, with
    the validation in between and whatever other callbacks do, such as a search for a batch size. It ends after an
    exception, too. A `MemoryBudget` that runs already on this thread is used as it is, and `limit` is not.

    If the Trainer has a logger, it gets, as often as `log_every_n_steps` says and once at the end:

    - `torchdelta/peak_gib`: most GiB of tensors at once;
    - `torchdelta/slowdown`: time of the batches against the time of the model's own ops in them, an estimate of a plain
      step. What Python does between ops is not in that estimate, so for a small model the plain step is slower;
    - `torchdelta/stall_ms`: milliseconds a batch that the training waited for swapped tensors;
    - `torchdelta/recompute_ms`: milliseconds a batch spent on computing tensors again;
    - `torchdelta/swapped_gib`: GiB a batch that were swapped out.

    They are of the batches since the last log, and of the process that logs, which is the first one.

    Args:
        limit: The budget of each process, as `MemoryBudget` takes it: "8GiB", "80%", "auto", or an int of bytes.
        config: Options; the default is right for most. `host_budget` and `disk_budget` are for all processes that the
            Trainer starts on a machine together.
        plan: A plan to follow, from `torchdelta plan`: the path of its file, or a `Plan`.

    Attributes:
        budget: The budget of the latest `fit` in this process, for `callback.budget.summary()`; None before the first.

    Raises:
        SizeError: `limit` cannot be parsed.
        BudgetError: (in `trainer.fit`) The step does not fit, whatever is evicted. Lightning's batch-size finder takes
            it for out of memory and tries a smaller batch.

    Example:
        >>> trainer = Trainer(callbacks=[MemoryBudgetCallback("8GiB")])  # doctest: +SKIP
        >>> trainer.fit(model, loader)  # doctest: +SKIP
    """

    _num_batches = 0
    _num_processes: int | None = None

    # -- events of the Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the budget. A batch-size finder begins only after this event."""
        del pl_module
        if stage != "fit":
            return
        if any(kind.__module__.startswith("pytorch_lightning") for kind in type(trainer).__mro__):
            raise ConfigError(
                "MemoryBudgetCallback is for the Trainer of `lightning.pytorch`, this one is of `pytorch_lightning`: "
                "use `from lightning.pytorch import Trainer`"
            )
        self._num_processes = trainer.num_devices if trainer.world_size > 1 else None
        self._begin_training(self.config)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count the batches."""
        del pl_module
        self._num_batches = _num_batches(trainer)  # more than 0 after a checkpoint was loaded

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a batch, after the figures of those before it are logged if Lightning has logged its own."""
        del pl_module, batch, batch_idx
        num_batches = _num_batches(trainer)
        if num_batches != self._num_batches:  # else gradients are accumulated, and Lightning logs nothing
            self._num_batches = num_batches
            every = getattr(trainer, "log_every_n_steps", 0)  # Lightning sets it outside of the class
            if every and num_batches % every == 0:
                self._log(trainer)
        self._begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure a batch."""
        del trainer, pl_module, outputs, batch, batch_idx
        self._end_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was not logged yet."""
        del pl_module
        self._log(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the budget; `teardown` does not follow."""
        del trainer, pl_module, exception
        with contextlib.suppress(BudgetError):  # the exception is raised already
            self.stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the budget."""
        del trainer, pl_module
        if stage == "fit":
            self.stop()

    def stop(self) -> None:
        """Stop the budget that this callback started, if it still runs."""
        try:
            super().stop()
        finally:
            declare_processes_here(None)

    # -- inside

    def _start(self) -> None:
        # Lightning's own launchers do not set LOCAL_WORLD_SIZE, by which a budget divides what processes share. After a
        # training inside of this one, whose callback has ended this budget, it starts again.
        declare_processes_here(self._num_processes)
        super()._start()

    def _log(self, trainer: Trainer) -> None:
        values = self._since_log.values(planned_time_s(self.budget)) if trainer.loggers else {}
        self._since_log = Figures()
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=max(0, _num_batches(trainer) - 1))


def _num_batches(trainer: Trainer) -> int:
    """Return after how many batches optimizers have stepped, by which Lightning numbers its logs."""
    return trainer.fit_loop.epoch_loop.on_save_checkpoint()["_batches_that_stepped"]


# Not in `on_exception`: a batch-size finder catches the error before that, and so does what Lightning does at the end.
_FitLoop.run = naming_impossible_steps()(_FitLoop.run)


@contextlib.contextmanager
def _restoring_handlers() -> Generator[None]:
    """Take the budget's signal handlers off where Lightning puts back those that it found when the training began.

    After an exception, the budget has ended before that.
    """
    try:
        yield
    finally:
        interrupts.restore()


_SignalConnector.teardown = _restoring_handlers()(_SignalConnector.teardown)
