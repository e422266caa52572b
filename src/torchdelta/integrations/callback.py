"""What the callbacks of all frameworks share: a budget that a training starts or joins, and when it ends."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

from torchdelta.budget import MemoryBudget
from torchdelta.config import Config
from torchdelta.errors import ConfigError
from torchdelta.integrations.figures import Figures
from torchdelta.runtime.current import current_session
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.session import Session
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    import os
    from collections.abc import Generator

    from torchdelta.plan.model import Plan
    from torchdelta.summary import Totals

__all__ = ["BudgetCallback", "naming_impossible_steps", "stop_orphan"]

_logger = logging.getLogger("torchdelta")

# Budgets that a callback started. One that still runs when another training begins is of a training that has ended
# without any further event.
_started: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()


class BudgetCallback:
    """A base of the callbacks, to stand before the framework's own; they say what the arguments are."""

    def __init__(
        self, limit: int | str, config: Config | None = None, plan: str | os.PathLike[str] | Plan | None = None
    ) -> None:
        super().__init__()
        if not (isinstance(limit, str) and limit.strip().lower() == "auto"):
            # The budget is made when the training begins: a percentage initializes CUDA, and only the Trainer chooses
            # the device. What cannot be parsed is refused here.
            parse_size(limit, total_bytes=2**50, name="memory budget")
        if config is not None and not isinstance(config, Config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"config={config!r} is not a torchdelta.Config: use Config(tier='memory')")
        self.limit = limit
        self.config = config
        self.plan = plan
        self.budget: MemoryBudget | None = None
        self._is_ours = False
        self._measure_from(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned process gets: all but the budget of a training in this process."""
        return {**self.__dict__, "budget": None, "_is_ours": False, "_at_begin": None}

    def stop(self) -> None:
        """Stop the budget that this callback started, if it still runs."""
        is_ours, self._is_ours = self._is_ours, False
        if is_ours and self.budget is not None and MemoryBudget.current() is self.budget:
            self.budget.stop()

    def _begin_training(self, config: Config | None) -> None:
        """Start the budget, or join the one that runs already on this thread."""
        stop_orphan()
        self._is_ours = False
        running = MemoryBudget.current()
        if running is None:
            self.budget = MemoryBudget(self.limit, config, plan=self.plan)
            self._start()
            return
        self.budget = running
        self._measure_from(running.totals().num_steps)
        _logger.info(
            "MemoryBudgetCallback(%r): a budget of %s runs already and is used instead",
            self.limit,
            format_bytes(running.budget_bytes),
        )

    def _start(self) -> None:
        assert self.budget is not None
        self.budget.start()
        self._is_ours = True
        _started.add(self.budget)
        self._measure_from(self.budget.totals().num_steps)

    def _measure_from(self, first_step: int) -> None:
        """Forget all figures; the budget's steps from this one on are measured."""
        self._next_step = first_step
        self._at_begin: tuple[float, Totals] | None = None
        self._since_log = Figures()
        self._of_training = Figures()

    def _begin_step(self) -> None:
        """Begin to measure what the framework calls a step."""
        if self._is_ours and MemoryBudget.current() is not self.budget:
            # Another training ran inside of this one, for instance in an evaluation, and its callback stopped ours.
            stop_orphan()
            self._start()
        if self.budget is not None:
            self._at_begin = (time.perf_counter(), self.budget.totals())

    def _end_step(self) -> bool:
        """Add the step to the figures; return False if its begin was not measured."""
        if self.budget is None or self._at_begin is None:
            return False
        start_s, before = self._at_begin
        time_s = time.perf_counter() - start_s
        after = self.budget.totals()
        summaries = self.budget.steps_since(self._next_step)
        self._next_step = after.num_steps
        for figures in (self._since_log, self._of_training):
            figures.add(time_s, before, after, summaries)
        return True


def stop_orphan() -> None:
    """Stop the budget that runs on this thread if a callback started it: its training ended in an exception."""
    running = MemoryBudget.current()
    if running is not None and running in _started:
        with contextlib.suppress(BudgetError):  # that training has raised its own error
            running.stop()


@contextlib.contextmanager
def naming_impossible_steps() -> Generator[None]:
    """Raise the BudgetError of a step that does not fit in place of what the step has made a program raise.

    The rest of such a step runs on tensors without content (runtime/survey/survey.py). Some code cannot: `.numpy()` of
    a loss raises an error of torch's that says nothing of the budget.

    Raises:
        BudgetError: With the need that was found so far, from the program's own error.
    """
    try:
        yield
    except Exception as error:
        session = current_session()
        if isinstance(session, Session) and session.survey is not None:
            raise session.take_error() from error
        raise
