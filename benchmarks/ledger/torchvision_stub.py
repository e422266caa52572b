"""A stand-in for torchvision where it is not installed: timm imports names of it that its models never use."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["install_if_missing"]

_MODES = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS", "NEAREST_EXACT")


class _Module(types.ModuleType):
    __path__: Any = ()  # what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            made: Any = enum.Enum(name, {mode: mode.lower() for mode in _MODES})
        else:
            made = type(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.split(".", maxsplit=1)[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def install_if_missing() -> None:
    """Make `import torchvision` work for whoever only wants its names."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
