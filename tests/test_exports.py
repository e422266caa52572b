"""The public names are those that are written down, and each can be had."""

import importlib
import subprocess
import sys

import pytest

import torchdelta
from tests.test_imports import MODULES

PUBLIC = ["BudgetError", "Config", "MemoryBudget", "SavedBuffer", "Summary", "TorchdeltaError", "__version__"]


def test_the_public_names_are_frozen():
    """Adding or removing a public name is a decision, taken here too."""
    assert torchdelta.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_resolves(name):
    """A lazy name loads, is listed by dir(), and is an object of the module that the package names as its home."""
    value = getattr(torchdelta, name)
    assert name in dir(torchdelta)
    if name != "__version__":
        assert value.__name__ == name
        assert getattr(importlib.import_module(torchdelta._HOMES[name]), name) is value


def test_an_unknown_name_is_an_attribute_error():
    """The lazy lookup does not swallow misspellings."""
    with pytest.raises(AttributeError, match="MemoryBugdet"):
        _ = torchdelta.MemoryBugdet


def test_a_star_import_brings_all_names():
    """`from torchdelta import *` works, lazily loaded names included."""
    code = f"from torchdelta import *; assert all(n in globals() for n in {PUBLIC!r}); print('ok')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "ok\n"


def test_the_budget_error_is_an_out_of_memory_error():
    """Retry loops that know torch's error and nothing of torchdelta catch it."""
    import torch

    assert issubclass(torchdelta.BudgetError, torch.OutOfMemoryError)
    assert issubclass(torchdelta.BudgetError, torchdelta.TorchdeltaError)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in {"__main__", "__init__"}])
def test_all_of_a_module_is_complete(module):
    """A module's __all__, where it has one, names what exists and leaves out no public class or function made there."""
    loaded = importlib.import_module(f"torchdelta.{module}")
    names = getattr(loaded, "__all__", None)
    if names is not None:  # the order in it is ruff's to judge (RUF022)
        assert len(names) == len(set(names))
        assert all(hasattr(loaded, name) for name in names)
        assert _own_public(loaded) <= set(names)


def _own_public(module) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    }
