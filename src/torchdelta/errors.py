"""The errors of torchdelta that need no torch.

    TorchdeltaError (Exception)
    |-- SizeError (ValueError)             a size that cannot be parsed: "8 potatoes", 0.8, "-1GiB"
    |-- ConfigError (ValueError)           an option with a value that is not allowed
    |-- TraceFileError                     a trace file that is damaged, in another format or of another version
    |-- TraceError                         a step that cannot be traced: a module, a function, its return value
    |-- MachineError (ValueError)          an unknown machine, or one with invalid figures
    |-- PoolError (ValueError)             invalid lives, or a capacity that cannot hold them
    |-- PlanError                          an unknown planner, or a plan or bound that cannot be computed
    |   `-- InfeasibleError                no plan within the budget
    |-- ScopeError (RuntimeError)          a MemoryBudget that is nested, started while it runs, or stopped while not
    |-- SavedTensorError (RuntimeError)    the content of a saved tensor is lost
    |-- NativeError (RuntimeError)         native code that cannot be built or used here
    |-- ReplayError (RuntimeError)         a replay whose result differs from what was dropped
    |-- TierError (RuntimeError)           a swap tier that cannot do what it was asked to
    |   |-- TierFullError                  a tier without free space
    |   `-- TierIOError                    a read or write that failed or was incomplete
    `-- BudgetError (torch.OutOfMemoryError)   the run does not fit the budget (in runtime/errors.py: needs torch)

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
    """A size or budget cannot be parsed, or is invalid."""


class ConfigError(TorchdeltaError, ValueError):
    """An option has a value that is not allowed."""


class TraceFileError(TorchdeltaError):
    """A trace file is damaged, is not a trace file, or has an unknown version."""


class TraceError(TorchdeltaError):
    """A step cannot be traced (its module, its function, its return value), or two traces do not match."""


class MachineError(TorchdeltaError, ValueError):
    """A machine is unknown, or its figures are invalid."""


class PoolError(TorchdeltaError, ValueError):
    """The lives to place are invalid, a capacity cannot hold them, or a placement is wrong."""


class PlanError(TorchdeltaError):
    """A planner is unknown, or a plan or a bound cannot be computed."""


class InfeasibleError(PlanError):
    """No plan within the budget was found.

    Attributes:
        least_budget_bytes: The least budget for which a plan was found, None if none was.
    """

    def __init__(self, message: str, *, least_budget_bytes: int | None) -> None:
        super().__init__(message)
        self.least_budget_bytes = least_budget_bytes


class ScopeError(TorchdeltaError, RuntimeError):
    """A MemoryBudget is nested, started while it runs, stopped while it does not run, or used on another thread."""


class SavedTensorError(TorchdeltaError, RuntimeError):
    """The content of a tensor that was saved for backward is lost."""


class NativeError(TorchdeltaError, RuntimeError):
    """Native code cannot be built or used here."""


class ReplayError(TorchdeltaError, RuntimeError):
    """The result of a replay differs from what was dropped."""


class TierError(TorchdeltaError, RuntimeError):
    """A swap tier cannot do what it was asked to."""


class TierFullError(TierError):
    """A swap tier has no free space."""


class TierIOError(TierError):
    """A read or write of a swap tier failed, or was incomplete."""
