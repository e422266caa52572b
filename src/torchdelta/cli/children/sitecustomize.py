"""Runs first in every Python process under `torchdelta run`; see the package's `__init__.py`.

It imports only the standard library, and runs the `sitecustomize` that it shadows, if any.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable  # noqa: TC003 - typing is no cheaper

_MODULE = "torch.optim.optimizer"
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is slow to import


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _OptimizerFinder(importlib.abc.MetaPathFinder):
    """Patches `torch.optim` on import so that the first optimizer of the process opens the scope."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - the import system's
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)  # let the other finders find it
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _watch(module.Optimizer)

            spec.loader.exec_module = exec_module
        return spec


def _watch(optimizer_class: type) -> None:
    original: Callable[..., None] = optimizer_class.__init__

    @functools.wraps(original)
    def first(*args: object, **kwargs: object) -> None:
        optimizer_class.__init__ = original  # pyright: ignore[reportAttributeAccessIssue]
        try:
            from torchdelta.cli.children import open_scope

            open_scope()
        except Exception as error:  # noqa: BLE001 - this interpreter may lack torchdelta, and it trains all the same
            with contextlib.suppress(Exception):
                print(f"torchdelta[pid {os.getpid()}]: this process opens no budget: {error}", file=sys.stderr)
        original(*args, **kwargs)

    optimizer_class.__init__ = first  # pyright: ignore[reportAttributeAccessIssue]


if "TORCHDELTA_RUN" in os.environ:
    sys.meta_path.insert(0, _OptimizerFinder())
_run_hidden()
