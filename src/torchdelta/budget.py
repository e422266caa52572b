"""MemoryBudget: the one object that a user meets."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Never, Self

from torchdelta.config import Config
from torchdelta.errors import ConfigError, ScopeError
from torchdelta.host import share_bytes
from torchdelta.runtime import interrupts
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device.memory import device_memory_bytes, free_for_tensors, session_device
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.observe.trace_output import check_trace_path
from torchdelta.settings import resolve_settings
from torchdelta.summary import Totals
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    from torchdelta.plan.model import Plan
    from torchdelta.runtime.follow.given_plan import GivenPlan
    from torchdelta.runtime.session import Session
    from torchdelta.summary import StepSummary, Summary
    from torchdelta.trace.model import Trace

__all__ = ["MemoryBudget"]

_logger = logging.getLogger("torchdelta")
_running = threading.local()  # the thread's budget, for `MemoryBudget.current()`


class MemoryBudget:
    """Keep the code that runs inside it within a number of bytes of device memory, with bit-equal results.

    Use it around an ordinary training loop, or call `start()` and `stop()` from a framework's callbacks. It acts on the
    thread that started it. It can be started again after it was stopped, but not nested.

    Args:
        budget: "8GiB", "80%" (of the device; on CPU of the lesser of RAM and the cgroup's limit), an int of bytes, or
            "auto": what is free when it starts, less a margin. On a GPU that is what the driver says is free and what
            this process's allocator holds, less 0.6 GiB and a sixteenth of the memory for context and fragmentation. On
            CPU it is the lesser of the available RAM and of what is left in the cgroup's limit, minus 10 % (at least
            256 MiB; under torchrun a share of it for each process of this machine), plus the bytes of tensors that
            already exist; with `Config(tier="memory")` less `host_budget`, or half of it.
        config: Options; the default is right for most.
        plan: A plan of this step to follow, from `torchdelta plan`: the path of its file, or a `Plan`. It takes the
            place of `Config(planner=...)`. The second step is traced; if the plan is one of that step and holds the
            budget there, it is carried out from the third one on, else a warning says why not. docs/following.md has
            the way from a step to its plan.
        trace_out: Write the trace of the second step to this file, for `torchdelta plan`.

    Raises:
        SizeError: The budget cannot be parsed.
        ConfigError: `config` is no Config, `plan` is given beside a planner or forced decisions, or `trace_out` cannot
            be written.
        PlanError: The plan's file cannot be read.
        BudgetError: (inside the scope) The step does not fit, whatever is evicted; names the least budget that fits.
        ScopeError: It is nested, is stopped while not running, or is used on another thread than the one that started
            it.

    Example:
        >>> with MemoryBudget("8GiB") as budget:  # doctest: +SKIP
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> print(budget.summary())  # doctest: +SKIP
    """

    def __init__(
        self,
        budget: int | str,
        config: Config | None = None,
        *,
        plan: str | os.PathLike[str] | Plan | None = None,
        trace_out: str | os.PathLike[str] | None = None,
        **misplaced: Never,
    ) -> None:
        if misplaced:
            raise TypeError(_misplaced_message(budget, misplaced))
        self.config: Config = config if config is not None else Config()
        _check_config(self.config)
        if plan is not None and self.config.planner not in (None, "auto"):
            raise ConfigError("plan and Config(planner=...) exclude each other: leave one of them out")
        if plan is not None and self.config.decisions is not None:
            raise ConfigError("plan and Config(decisions=...) exclude each other: leave one of them out")
        self._plan: GivenPlan | None = None
        if plan is not None:
            from torchdelta.runtime.follow.given_plan import given_plan  # as in `_start`

            self._plan = given_plan(plan)
        self._trace_out = check_trace_path(trace_out) if trace_out is not None else None
        # Query the device only for a percentage and "auto": that initializes CUDA, and the script may still fork or
        # choose a device.
        self._is_auto = isinstance(budget, str) and budget.strip().lower() == "auto"
        is_share = isinstance(budget, str) and budget.rstrip().endswith("%")
        total_bytes = device_memory_bytes() if is_share else None
        self.budget_bytes: int
        if self._is_auto:
            self.budget_bytes, _ = self._find_free()
        else:
            self.budget_bytes = parse_size(budget, total_bytes=total_bytes, name="budget")
        self._session: Session | None = None
        self._past: list[Session] = []

    @classmethod
    def from_settings(
        cls,
        budget: int | str | None = None,
        *,
        file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        plan: str | os.PathLike[str] | Plan | None = None,
        trace_out: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """Make a budget as `torchdelta run` does: from arguments, environment variables, a file, and defaults.

        An argument wins over its environment variable (`TORCHDELTA_MEMORY_BUDGET`, `TORCHDELTA_POLICY`, ...), that over
        the file, that over the default. docs/reference/config.md lists the keys. `MemoryBudget(...)` itself reads none
        of this.

        Args:
            budget: As of `MemoryBudget`; None: as the environment or the file says.
            file: A TOML file, or a mapping with its keys. None: the file that TORCHDELTA_CONFIG names, else
                `torchdelta.toml` or `[tool.torchdelta]` of `pyproject.toml` in the working directory, if there is one.
            plan: As of `MemoryBudget`.
            trace_out: As of `MemoryBudget`.
            options: Attributes of `Config`.

        Raises:
            ConfigError: There is no budget anywhere, a key is unknown, or a value is not allowed; the message names the
                file or the variable.
            SizeError: The budget cannot be parsed.
        """
        if budget is not None:
            options["memory_budget"] = budget
        settings = resolve_settings(options, file=file)
        return cls(settings.required_budget(), settings.config, plan=plan, trace_out=trace_out)

    def __repr__(self) -> str:
        """Return the constructor call."""
        plan = "" if self._plan is None else f", plan={self._plan.name!r}"
        trace_out = "" if self._trace_out is None else f", trace_out={self._trace_out!r}"
        return f"MemoryBudget({self.budget_bytes}, {self.config!r}{plan}{trace_out})"

    def start(self) -> None:
        """Start to enforce the budget on this thread."""
        outer = interrupts.enter()
        try:
            self._start()
        except BaseException:
            interrupts.leave(outer)
            raise
        try:
            interrupts.leave(outer)
        except BaseException:  # a Ctrl-C during the start: the caller assumes that the budget did not start
            self.stop()
            raise

    def _start(self) -> None:
        if self._session is not None:
            msg = "this MemoryBudget is already running: stop it first"
            raise ScopeError(msg)
        if self._is_auto:
            self.budget_bytes, how = self._find_free()
            _logger.info("budget auto: %s: %s", format_bytes(self.budget_bytes), how)
        from torchdelta.runtime.session import Session  # takes longer to import than all else that this file needs

        session = Session(self.budget_bytes, self.config, self._plan, self._trace_out)
        session.start()
        self._session = session
        _running.budget, _running.session = self, session

    def _find_free(self) -> tuple[int, str]:
        is_in_memory = self.config.tier == "memory"
        from torchdelta.runtime.record.scan import count_tensors  # as in `_start`

        device = session_device()
        return free_for_tensors(
            count_tensors(device) if device.type == "cpu" else 0,
            swap_bytes=share_bytes(self.config.host_budget_bytes) if is_in_memory else 0,
        )

    @interrupts.shielded
    def stop(self) -> None:
        """Stop enforcing the budget. Graphs made inside stay usable."""
        session = self._session
        if session is None:
            msg = "this MemoryBudget is not running: start it first"
            raise ScopeError(msg)
        self._session = None
        self._past = [session]
        try:
            session.stop()
        except ScopeError:
            self._session = session  # called from another thread: the session keeps running
            raise
        finally:
            if self._session is None and getattr(_running, "budget", None) is self:
                _running.budget = _running.session = None

    @staticmethod
    def current() -> MemoryBudget | None:
        """Return the budget that runs on this thread, or None.

        `MemoryBudget.current().stop()` stops a budget whose variable is lost, such as that of a notebook cell that ran
        twice.
        """
        budget: MemoryBudget | None = getattr(_running, "budget", None)
        return budget if budget is not None and _running.session is current_session() else None  # none after a fork

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    @interrupts.destructor  # a Ctrl-C that arrives before `stop` has begun waits, or the scope would stay open
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, also after an exception. Raise the BudgetError of an impossible step if none was raised inside."""
        if error is not None and self._session is None:  # stopped inside; else `stop` would hide the error
            return
        if isinstance(error, BudgetError) or (error is not None and not isinstance(error, Exception)):
            with contextlib.suppress(BudgetError):
                self.stop()
        else:
            self.stop()

    def summary(self) -> Summary:
        """Return the summary since the last start."""
        return self._started("no summary").summary()

    def totals(self) -> Totals:
        """Return what was done since the last start, at the cost of reading a few numbers.

        The difference between two calls is what was done between them.
        """
        session = self._started("no totals")
        counters = session.counters
        return Totals(
            num_steps=session.steps.num_steps,
            swapped_out_bytes=counters.swapped_out_bytes,
            stall_s=counters.stall_s,
            recompute_s=counters.recompute_s,
            op_time_s=counters.op_time_s,
            num_followed_steps=session.follower.num_followed_steps,
            present_peak_bytes=session.ledger.usage.peak_bytes,
        )

    @property
    def _latest(self) -> Session | None:
        return self._session or (self._past[-1] if self._past else None)

    def _started(self, without: str) -> Session:
        if self._latest is None:
            msg = f"this MemoryBudget was never started: there is {without}"
            raise ScopeError(msg)
        return self._latest

    def steps_since(self, index: int) -> tuple[StepSummary, ...]:
        """Return the complete steps from this index on since the last start, for a log that is written in every step.

        It takes time for the returned steps alone, where `summary()` goes through all of the latest 10,000 steps.

        Args:
            index: Position of the first wanted step, from 0.
        """
        session = self._latest
        return session.steps.summaries_since(index) if session is not None else ()

    def trace(self) -> Trace:
        """Return the trace of the first complete step since the last start: its ops and buffers as without a budget.

        `torchdelta.trace.model` describes it; `torchdelta.trace.file.write_trace` writes it to a file. Later steps are
        not traced, at no cost. The first step makes the optimizer's states: for a plan that later steps can follow,
        have the second one traced with `MemoryBudget(..., trace_out="step.trace")`.

        Raises:
            ScopeError: The budget was never started, no step is complete yet, or the trace was dropped (the log says
                why).
        """
        session = self._latest
        trace = session.trace() if session is not None else None
        if trace is None:
            msg = (
                "there is no trace: run one complete training step (forward, backward and optimizer) inside the budget "
                "first"
            )
            raise ScopeError(msg)
        return trace


def _misplaced_message(budget: object, options: Mapping[str, object]) -> str:
    known = [field.name for field in fields(Config)]
    name = next(iter(options))
    if name not in known:
        return f"MemoryBudget() has no option {name!r}: it takes budget, config, plan and trace_out"
    given = ", ".join(f"{key}={value!r}" for key, value in options.items() if key in known)
    return f"{name!r} is an option of Config: write MemoryBudget({budget!r}, Config({given}))"


def _check_config(config: Any) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r} is not a torchdelta.Config: use Config(tier='memory')")
