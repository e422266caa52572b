"""MemoryBudget: the one object that a user meets."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from torchdelta.config import Config
from torchdelta.errors import ScopeError
from torchdelta.runtime import interrupts
from torchdelta.runtime.device import device_memory_bytes
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.session import Session
from torchdelta.units import parse_size

if TYPE_CHECKING:
    from types import TracebackType

    from torchdelta.summary import Summary
    from torchdelta.trace.model import Trace

__all__ = ["MemoryBudget"]


class MemoryBudget:
    """Keep whatever runs inside it within a number of bytes of device memory, with the same bits.

    Use it around an ordinary training loop, or call `start()` and `stop()` from a framework's callbacks. It acts on the
    thread that started it. It may be used again after it was stopped, but not nested.

    Args:
        budget: "8GiB", "80%" (of the device; on CPU of the lesser of RAM and the cgroup's limit), or an int of bytes.
        config: Options; the default is right for most.

    Raises:
        SizeError: The budget cannot be read.
        BudgetError: (inside the scope) the step does not fit, whatever leaves; names the least budget that would do.
        ScopeError: Nested use, stopping what is not running, or another thread than the one that started it.

    Example:
        >>> with MemoryBudget("8GiB") as budget:  # doctest: +SKIP
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> print(budget.summary())  # doctest: +SKIP
    """

    def __init__(self, budget: int | str, config: Config | None = None) -> None:
        self.config = config if config is not None else Config()
        # Only a share asks the device: that starts CUDA, and a script may want to fork, or choose its device, before.
        is_share = isinstance(budget, str) and budget.rstrip().endswith("%")
        total_bytes = device_memory_bytes() if is_share else None
        self.budget_bytes = parse_size(budget, total_bytes=total_bytes, name="budget")
        self._session: Session | None = None
        self._past: list[Session] = []

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"MemoryBudget({self.budget_bytes}, {self.config!r})"

    def start(self) -> None:
        """Begin to hold the budget on this thread."""
        outer = interrupts.enter()
        try:
            self._start()
        except BaseException:
            interrupts.leave(outer)
            raise
        try:
            interrupts.leave(outer)
        except BaseException:  # a Ctrl-C that came meanwhile: whoever called does not know that it is on
            self.stop()
            raise

    def _start(self) -> None:
        if self._session is not None:
            msg = "this MemoryBudget is running already: stop it first"
            raise ScopeError(msg)
        session = Session(self.budget_bytes, self.config)
        session.start()
        self._session = session

    @interrupts.shielded
    def stop(self) -> None:
        """Stop holding the budget. Graphs made inside stay usable."""
        session = self._session
        if session is None:
            msg = "this MemoryBudget is not running: start it first"
            raise ScopeError(msg)
        self._session = None
        self._past = [session]
        try:
            session.stop()
        except ScopeError:
            self._session = session  # another thread asked: it runs on
            raise

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, whatever happened inside. An impossible budget that nothing else has told of yet is told here."""
        if isinstance(error, BudgetError) or (error is not None and not isinstance(error, Exception)):
            with contextlib.suppress(BudgetError):
                self.stop()
        else:
            self.stop()

    def summary(self) -> Summary:
        """Return what was done since the last start."""
        session = self._session or (self._past[-1] if self._past else None)
        if session is None:
            msg = "this MemoryBudget was never started: there is nothing to sum up"
            raise ScopeError(msg)
        return session.summary()

    def trace(self) -> Trace:
        """Return the trace of the first complete step since the last start.

        Its ops and buffers, as they are without a budget.

        `torchdelta.trace.model` describes it, `torchdelta.trace.file.write_trace` writes it to a file. Later steps are
        not traced and pay nothing for it.

        Raises:
            ScopeError: There is none: never started, no step complete so far, or the trace was dropped (the log says
                why).
        """
        session = self._session or (self._past[-1] if self._past else None)
        trace = session.trace() if session is not None else None
        if trace is None:
            msg = (
                "there is no trace: run one complete training step (forward, backward and optimizer) inside the budget "
                "first"
            )
            raise ScopeError(msg)
        return trace
