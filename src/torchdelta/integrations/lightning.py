"""MemoryBudgetCallback: a memory budget for Lightning's Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from torchdelta.integrations.callback import BudgetCallback, naming_impossible_steps
from torchdelta.integrations.figures import Figures, planned_time_s
from torchdelta.runtime import interrupts
from torchdelta.runtime.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning.pytorch import LightningModule, Trainer

    from torchdelta.config import Config

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

    _index = _global_step = 0

    # -- events of the Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the budget. A batch-size finder begins only after this event."""
        del pl_module
        if stage != "fit":
            return
        self._begin_training(_for_process(self.config, trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count the batches after which an optimizer steps, by which Lightning numbers its logs."""
        del pl_module
        self._index = self._global_step = trainer.global_step  # more than 0 after a checkpoint was loaded

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a batch."""
        del trainer, pl_module, batch, batch_idx
        self._begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure a batch, and log together with Lightning."""
        del pl_module, outputs, batch, batch_idx
        # Otherwise gradients are accumulated, and Lightning logs nothing.
        if self._end_step() and trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._index += 1
            every = getattr(trainer, "log_every_n_steps", 0)  # Lightning sets it outside of the class
            if every and self._index % every == 0:
                self._log(trainer)

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

    # -- inside

    def _log(self, trainer: Trainer) -> None:
        values = self._since_log.values(planned_time_s(self.budget)) if trainer.loggers else {}
        self._since_log = Figures()
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=max(0, self._index - 1))


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


def _for_process(config: Config | None, trainer: Trainer) -> Config | None:
    """Return the options for this process: its share of what the processes of a machine have together.

    Under torchrun the budget itself divides by LOCAL_WORLD_SIZE, which Lightning's own launchers do not set.
    """
    if config is None or trainer.world_size == 1 or "LOCAL_WORLD_SIZE" in os.environ:
        return config
    num_processes = max(1, trainer.num_devices)
    sizes_bytes = {"host_budget": config.host_budget_bytes, "disk_budget": config.disk_budget_bytes}
    shares = {name: max(1, size // num_processes) for name, size in sizes_bytes.items() if size is not None}
    return dataclasses.replace(config, **shares) if shares else config
