"""Train any PyTorch model inside a byte budget, with the same bits as without it.

    from torchdelta import MemoryBudget

    with MemoryBudget("8GiB") as budget:   # around an ordinary, unchanged training loop
        ...
    print(budget.summary())

The names load on first use (PEP 562): `import torchdelta` brings no torch along, so that the parts of the library
that need none start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdelta.budget import MemoryBudget
    from torchdelta.config import Config, SavedBuffer
    from torchdelta.errors import TorchdeltaError
    from torchdelta.runtime.errors import BudgetError
    from torchdelta.summary import Summary

__all__ = ["BudgetError", "Config", "MemoryBudget", "SavedBuffer", "Summary", "TorchdeltaError", "__version__"]

__version__ = "0.1.0"

_HOMES: Final = {
    "BudgetError": "torchdelta.runtime.errors",
    "Config": "torchdelta.config",
    "MemoryBudget": "torchdelta.budget",
    "SavedBuffer": "torchdelta.config",
    "Summary": "torchdelta.summary",
    "TorchdeltaError": "torchdelta.errors",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
