"""Train any PyTorch model inside a byte budget, with the same bits as without it.

    from torchdelta import MemoryBudget

    with MemoryBudget("8GiB") as budget:   # around an ordinary, unchanged training loop
        ...
    print(budget.summary())

`plan_step` plans a traced step for a machine that need not be here, and predicts what it costs.

The names load on first use (PEP 562): `import torchdelta` brings no torch along, so that the parts of the library
that need none start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torchdelta.budget import MemoryBudget
    from torchdelta.config import Config, SavedBuffer
    from torchdelta.errors import TorchdeltaError
    from torchdelta.planners.prediction import Prediction, plan_step
    from torchdelta.runtime.errors import BudgetError
    from torchdelta.summary import Summary

__all__ = [
    "BudgetError",
    "Config",
    "MemoryBudget",
    "Prediction",
    "SavedBuffer",
    "Summary",
    "TorchdeltaError",
    "__version__",
    "plan_step",
]

__version__ = "0.1.0"

_HOMES: Final = {
    "BudgetError": "torchdelta.runtime.errors",
    "Config": "torchdelta.config",
    "MemoryBudget": "torchdelta.budget",
    "Prediction": "torchdelta.planners.prediction",
    "SavedBuffer": "torchdelta.config",
    "Summary": "torchdelta.summary",
    "TorchdeltaError": "torchdelta.errors",
    "plan_step": "torchdelta.planners.prediction",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # found without this function from now on
    return value


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook `%memory_budget`: IPython calls this for `%load_ext torchdelta`."""
    import_module("torchdelta.integrations.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Undo `%load_ext torchdelta`, for `%unload_ext torchdelta`."""
    import_module("torchdelta.integrations.notebook").unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
