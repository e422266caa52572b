"""`%memory_budget` and `%%memory_budget`: a memory budget for the cells of a notebook, after `%load_ext torchdelta`."""

from __future__ import annotations

import itertools
import sys
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from torchdelta.budget import MemoryBudget
from torchdelta.config import Config
from torchdelta.errors import SizeError, TorchdeltaError
from torchdelta.runtime import interrupts
from torchdelta.runtime.current import current_session
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.session import Session
from torchdelta.runtime.survey.survey import lacks_content
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from torchdelta.summary import Summary

__all__ = ["MemoryBudgetMagics", "load", "unload"]

_USAGE = "%memory_budget LIMIT [CONFIG], %memory_budget off, %memory_budget, or %%memory_budget LIMIT [CONFIG]"
_LEAVES_MUCH = (torch.OutOfMemoryError, KeyboardInterrupt, SystemExit)  # Lightning raises the last one after a Ctrl-C
_loaded: weakref.WeakKeyDictionary[Any, MemoryBudgetMagics] = weakref.WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Register the magics with a shell. Repeated calls do nothing."""
    if shell not in _loaded:
        magics = _loaded[shell] = MemoryBudgetMagics(shell)
        shell.register_magics(magics)
        shell.events.register("pre_run_cell", magics.before_cell)
        shell.events.register("post_run_cell", magics.after_cell)


def unload(shell: InteractiveShell) -> None:
    """Stop the budget, if any, and act on no further cell."""
    magics = _loaded.pop(shell, None)
    if magics is not None:
        try:
            magics.turn_off()
        finally:
            shell.events.unregister("pre_run_cell", magics.before_cell)
            shell.events.unregister("post_run_cell", magics.after_cell)


@magics_class
class MemoryBudgetMagics(Magics):
    """The magics of one shell. Mutable."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._budget: MemoryBudget | None = None  # of the following cells; it runs from the magic on
        self._summary: Summary | None = None  # of the latest budget that has ended and in which a step was seen
        self._bound: dict[str, int] = {}  # the id of what each name was bound to before the cell

    @line_cell_magic
    def memory_budget(self, line: str, cell: str | None = None) -> None:
        """Keep cells within a number of bytes of device memory, with bit-equal results.

        %memory_budget 8GiB           the rest of this cell, and all following ones
        %memory_budget 8GiB CONFIG    the same with options: an expression such as Config(tier="memory")
        %memory_budget                what was done since a budget last began
        %memory_budget off            no budget from here on
        %%memory_budget 8GiB          this cell alone
        """
        line = line.strip()
        if cell is not None:
            self._run(self._parse(line), cell)
        elif not line:
            self._show()
        elif line.lower() == "off":
            self.turn_off()
        else:
            budget = self._parse(line)
            self._end_refused()
            _stop_other()
            budget.start()
            self._budget, self._summary = budget, None
            print(f"memory budget of {format_bytes(budget.budget_bytes)} for this and the following cells")  # noqa: T201

    def turn_off(self) -> None:
        """Stop the budget of the following cells."""
        try:
            self._stop()
        except BudgetError:
            self._remove_names_without_content()
            raise
        finally:
            self._budget = None

    def before_cell(self, _info: Any) -> None:
        """Let the running budget delay Ctrl-C in this cell: a kernel installs its handler anew for each."""
        self._bound = {name: id(value) for name, value in self._shell.user_ns.items()}
        if self._is_running:
            interrupts.renew()

    def after_cell(self, result: ExecutionResult) -> None:
        """Raise what a cell has left unsaid, and free what one without memory or an interrupted one has left."""
        error = result.error_in_exec
        session = current_session()
        is_impossible = isinstance(session, Session) and session.survey is not None
        if error is not None and (is_impossible or isinstance(error, _LEAVES_MUCH)):
            # The shell keeps the error for %debug, and with it every tensor that the functions held: the cell that is
            # run again would have less room each time.
            _free_variables(error)
        if is_impossible:
            self._remove_names_without_content()
        if self._budget is not None and self._is_running and is_impossible:
            # A forward that does not fit, without its backward: the next cell must not go on with it. An error of the
            # cell's own may come from what such a forward returns.
            self._end_refused(shows_error=result.success or isinstance(error, Exception))
            self._budget.start()

    # -- inside

    def _parse(self, line: str) -> MemoryBudget:
        """Return a budget from "LIMIT [CONFIG]"."""
        limit, options = line, ""
        try:
            parse_size(line, total_bytes=2**50)  # "8 GiB" is one size
        except SizeError:
            limit, _, options = line.partition(" ")
        if not limit:
            raise UsageError(f"name a budget: {_USAGE}")
        try:
            config = self._shell.ev(options) if options.strip() else None
        except Exception as error:  # noqa: BLE001 - an expression of the user's
            raise UsageError(f"{options.strip()!r} cannot be used: {error} ({_USAGE})") from None
        if config is not None and not isinstance(config, Config):
            raise UsageError(f"{options.strip()!r} is no torchdelta.Config: {_USAGE}")
        try:
            return MemoryBudget(limit, config)
        except TorchdeltaError as error:
            raise UsageError(str(error)) from None

    @property
    def _shell(self) -> Any:
        return self.shell

    @property
    def _is_running(self) -> bool:
        return self._budget is not None and MemoryBudget.current() is self._budget

    def _stop(self) -> None:
        budget = self._budget
        if budget is not None and self._is_running:
            try:
                budget.stop()
            finally:
                self._note(budget)

    def _end_refused(self, *, shows_error: bool = True) -> None:
        """Stop the budget, and print the error of a step that did not fit in place of raising it."""
        try:
            self._stop()
        except BudgetError as error:
            if shows_error:
                print(f"BudgetError: {error}", file=sys.stderr)  # noqa: T201
            self._remove_names_without_content()

    def _remove_names_without_content(self) -> None:
        """Remove the names that a cell has bound to what was made after its budget was passed: it has no memory."""
        names = [
            name
            for name, value in self._shell.user_ns.items()
            if self._bound.get(name) != id(value) and not name.startswith("_") and _lacks_content(value)
        ]
        for name in names:
            del self._shell.user_ns[name]
        if names:
            print(  # noqa: T201
                f"removed {', '.join(names)}: made in a cell that did not fit its memory budget, without content",
                file=sys.stderr,
            )

    def _note(self, budget: MemoryBudget) -> None:
        summary = budget.summary()
        if summary.steps or summary.num_refused_steps:
            self._summary = summary

    def _run(self, budget: MemoryBudget, cell: str) -> None:
        """Run a cell inside a budget of its own."""
        goes_on = self._is_running
        self._stop()
        _stop_other()
        budget.start()
        try:
            result = self._shell.run_cell(cell)
        finally:
            try:
                if MemoryBudget.current() is budget:
                    budget.stop()
            finally:
                self._note(budget)
                if goes_on and self._budget is not None and MemoryBudget.current() is None:  # the cell may start one
                    self._budget.start()
        if not result.success:  # its traceback is shown already, but "run all" has to end here
            error = result.error_before_exec or result.error_in_exec
            raise UsageError(f"the cell ended with {type(error).__name__}, see above")

    def _show(self) -> None:
        if self._budget is not None and self._is_running:
            self._note(self._budget)
        if self._summary is not None:
            print(self._summary)  # noqa: T201
        elif self._budget is not None:
            print(f"memory budget of {format_bytes(self._budget.budget_bytes)}; no training step was seen")  # noqa: T201
        else:
            print(f"no memory budget: {_USAGE}")  # noqa: T201


def _lacks_content(value: Any) -> bool:
    """Return whether a value is, or holds, a tensor of a survey that runs."""
    waiting = [value]
    seen: set[int] = set()  # a list may contain itself
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if lacks_content(value):
            return True
        if isinstance(value, torch.nn.Module):
            waiting += itertools.chain(value.parameters(), value.buffers())
        elif isinstance(value, torch.optim.Optimizer):
            waiting += value.param_groups
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return False


def _free_variables(error: BaseException) -> None:
    """Free the local variables of all functions in the tracebacks of an error and of those that it was raised from."""
    waiting = [error]
    seen: set[int] = set()  # an error may have no hash
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        waiting += [origin for origin in (error.__cause__, error.__context__) if origin is not None]
        trace = error.__traceback__
        traceback.clear_frames(trace)
        while trace is not None:
            # Up to Python 3.12 this is a dict, which the shell's display has filled. Reading it again removes what is
            # gone.
            _ = trace.tb_frame.f_locals
            trace = trace.tb_next


def _stop_other() -> None:
    """Stop a budget that a cell has started and whose variable may be lost, as when that cell ran twice."""
    running = MemoryBudget.current()
    if running is not None:
        running.stop()
