"""The errors of torchdelta that need no torch.

    TorchdeltaError (Exception)
    |-- SizeError (ValueError)             a size that cannot be read: "8 potatoes", 0.8, "-1GiB"
    |-- ConfigError (ValueError)           an option with a value that is not allowed
    |-- TraceFileError                     a trace file that is damaged, foreign or of another version
    |-- TraceError                         a step that cannot be traced: a module, a function, what it returns
    |-- MachineError (ValueError)          a machine that is not known, or whose figures make no sense
    |-- PoolError (ValueError)             lives that make no sense, or a capacity that cannot hold them
    |-- PlanError                          a planner that is not known, or a plan or bound that cannot be made
    |   `-- InfeasibleError                no plan within the budget
    |-- ScopeError (RuntimeError)          a MemoryBudget that is nested, used twice, or stopped before it was started
    |-- SavedTensorError (RuntimeError)    a saved tensor that was changed after it was saved, or has gone
    |-- NativeError (RuntimeError)         a native piece that cannot be built or used here
    |-- ReplayError (RuntimeError)         a recomputation that did not give what was dropped
    |-- TierError (RuntimeError)           a swap tier that cannot do what was asked
    |   |-- TierFullError                  no room left in it
    |   `-- TierIOError                    a read or write that failed or came back short
    `-- BudgetError (torch.OutOfMemoryError)   the budget cannot be held (in runtime/errors.py: needs torch)

Each message is one line that says what failed, with the numbers and their units, and what to change.
"""

__all__ = [
    "ConfigError",
    "InfeasibleError",
    "MachineError",
    "NativeError",
    "PlanError",
    "PoolError",
    "ReplayError",
    "SavedTensorError",
    "ScopeError",
    "SizeError",
    "TierError",
    "TierFullError",
    "TierIOError",
    "TorchdeltaError",
    "TraceError",
    "TraceFileError",
]


class TorchdeltaError(Exception):
    """Everything that torchdelta raises on purpose."""


class SizeError(TorchdeltaError, ValueError):
    """A size or budget cannot be read, or makes no sense."""


class ConfigError(TorchdeltaError, ValueError):
    """An option has a value that is not allowed."""


class TraceFileError(TorchdeltaError):
    """A trace file is damaged, is no trace file, or has a version that is not known here."""


class TraceError(TorchdeltaError):
    """A step cannot be traced: its module, its function, what that returns, or two traces that do not fit together."""


class MachineError(TorchdeltaError, ValueError):
    """A machine is not known, or its figures make no sense."""


class PoolError(TorchdeltaError, ValueError):
    """Lives to place that make no sense, a capacity that cannot hold them, or a placement that is wrong."""


class PlanError(TorchdeltaError):
    """A planner is not known, or a plan or a bound cannot be made."""


class InfeasibleError(PlanError):
    """No plan within the budget was found.

    Attributes:
        least_budget_bytes: The least budget at which one was found on the way, None if none was.
    """

    def __init__(self, message: str, *, least_budget_bytes: int | None) -> None:
        super().__init__(message)
        self.least_budget_bytes = least_budget_bytes


class ScopeError(TorchdeltaError, RuntimeError):
    """A MemoryBudget is used where it has no meaning: nested, from a second thread, or stopped before its start."""


class SavedTensorError(TorchdeltaError, RuntimeError):
    """A tensor saved for backward was changed in place afterwards, or is no longer to be had."""


class NativeError(TorchdeltaError, RuntimeError):
    """A native piece cannot be built or used here."""


class ReplayError(TorchdeltaError, RuntimeError):
    """A recomputation did not give what was dropped."""


class TierError(TorchdeltaError, RuntimeError):
    """A swap tier cannot do what was asked of it."""


class TierFullError(TierError):
    """A swap tier has no room left."""


class TierIOError(TierError):
    """A read or write of a swap tier failed, or came back short."""
