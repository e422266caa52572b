"""The public names are those that are written down, and each can be had."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchdelta
from tests.test_imports import MODULES, place, tree_of

REPOSITORY = Path(__file__).parent.parent
PUBLIC = [
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


def test_the_public_names_are_frozen():
    """Adding or removing a public name is a decision, taken here too."""
    assert torchdelta.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_resolves(name):
    """A lazy name loads, is listed by dir(), and is the same object in the module that it says it is from."""
    value = getattr(torchdelta, name)
    assert name in dir(torchdelta)
    if name != "__version__":
        assert value.__name__ == name
        assert getattr(importlib.import_module(value.__module__), name) is value


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


def test_all_of_each_module_is_complete():
    """A module's __all__, where it has one, names what exists and leaves out no public class or function made there."""
    offenders = []
    for module in MODULES:
        if module in {"__main__", "__init__"}:
            continue
        try:
            loaded = importlib.import_module(f"torchdelta.{module}")
        except ModuleNotFoundError as error:
            if module.startswith("integrations.") and not str(error.name).startswith("torchdelta"):
                continue  # a framework that is not installed
            raise
        names = getattr(loaded, "__all__", None)
        if names is None:
            continue
        # The order of the names is ruff's to judge (RUF022).
        offenders += [f"{_place(module, '__all__')} names {name} twice" for name in names if names.count(name) > 1]
        missing = [name for name in names if not hasattr(loaded, name)]
        offenders += [f"{_place(module, '__all__')} names {name}, which does not exist" for name in missing]
        left_out = _own_public(loaded) - set(names)
        offenders += [f"{_place(module, name)} {name} is left out of __all__" for name in sorted(left_out)]
    assert not offenders, "\n".join(offenders)


def test_tests_and_benchmarks_import_what_exists():
    """A module or name of the package that moved is missed in a test that needs a device, too."""
    offenders = []
    for path in sorted(p for folder in ("tests", "benchmarks", "tools") for p in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for module, name in names:
                if module.partition(".")[0] == "torchdelta" and not _exists(module, name):
                    offenders.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {module} {name}".rstrip())
    assert not offenders, "\n".join(offenders)


def _exists(module: str, name: str) -> bool:
    """Return whether a module can be imported and has a name, as an attribute or as a module below it."""
    try:
        loaded = importlib.import_module(module)
        if name and not hasattr(loaded, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def _own_public(module) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    }


def _place(module: str, name: str) -> str:
    """Return the file and line where a module defines a name; line 1 where that cannot be read off its text."""
    lines = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines[node.name] = node.lineno
        for target in getattr(node, "targets", ()):
            lines[ast.unparse(target)] = node.lineno
    return place(module, lines.get(name, 1))
