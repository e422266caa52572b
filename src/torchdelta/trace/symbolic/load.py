"""Finds the function that a command line names: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdelta.errors import TraceError
from torchdelta.names import nearest

if TYPE_CHECKING:
    from collections.abc import Callable


def load_function(spec: str) -> Callable[..., Any]:
    """Import a module and return its function. The current directory is searched first, as by `python -m`.

    Args:
        spec: `MODULE:FUNCTION`; the function may be an attribute of an attribute, such as `models:Zoo.small`.

    Raises:
        TraceError: The text is no such name, the module cannot be imported, or has no such function. One line.
    """
    module_name, separator, function_name = spec.rpartition(":")
    if not (separator and module_name and function_name):
        raise TraceError(
            f"{spec!r} names no function: write MODULE:FUNCTION, such as models:resnet50, of a function that takes a "
            "batch size and returns (model, inputs)"
        )
    module = _import(module_name)
    found: Any = module
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise TraceError(f"{module_name} has no function {function_name!r}{_hint(module, function_name)}")
        found = getattr(found, part)
    if not callable(found):
        raise TraceError(f"{spec} is of type {type(found).__name__} and cannot be called: name a function")
    return found


def _import(name: str) -> Any:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        if name.endswith(".py"):
            return _import_file(Path(name))
        return importlib.import_module(name)
    except TraceError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise TraceError(
                f"no module {missing!r}: it is searched for in {directory} and where Python looks"
            ) from error
        raise TraceError(f"{name} cannot be imported: it needs {missing!r}, which is not installed") from error
    # A module may do anything while it is imported, also leave.
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:300]
        raise TraceError(f"{name} cannot be imported: {type(error).__name__}: {text or 'no message'}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise TraceError(f"no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TraceError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # for classes that are pickled, and dataclasses
    spec.loader.exec_module(module)
    return module


def _hint(module: Any, name: str) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = nearest(name, functions)
    return "" if near is None else f": did you mean {near}?"
