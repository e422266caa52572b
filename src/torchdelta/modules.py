"""Finds the running module on the Python stack: for the trace of a step, and for `decisions`.

Global module hooks would give the same answer, but Dynamo sees them: a compiled submodule would be recompiled, with
other bits. Walking up to the nearest `Module._call_impl` has no side effects and costs about a microsecond.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from torchdelta._torch.modules import MODULE_CALL_CODE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import torch


class ModulePaths:
    """Names the innermost running module by its path from the outermost one, such as "transformer.h.0.attn"."""

    def __init__(self, on_root: Callable[[torch.nn.Module], None] | None = None) -> None:
        """Call the method `on_root` (held by a weak reference) with each outermost module that runs."""
        self._on_root = weakref.WeakMethod(on_root) if on_root is not None else None
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def current(self) -> str:
        """Return the path; empty outside of modules."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL_CODE:
                module = frame.f_locals["self"]
                known = self._paths.get(id(module))
                if known is not None and known[0]() is module:
                    return known[1]
                return self._learn(module, frame)
            frame = frame.f_back
        return ""

    def _learn(self, module: torch.nn.Module, frame: FrameType | None) -> str:
        root = module
        while frame is not None:
            if frame.f_code is MODULE_CALL_CODE:
                root = frame.f_locals["self"]
            frame = frame.f_back
        for path, child in root.named_modules():
            self._paths[id(child)] = (weakref.ref(child), path)
        on_root = self._on_root() if self._on_root is not None else None
        if on_root is not None:
            on_root(root)
        known = self._paths.get(id(module))  # its id may be that of a dead module
        if known is None or known[0]() is not module:  # called by its parent, but not registered on it
            self._paths[id(module)] = (weakref.ref(module), type(module).__name__)
        return self._paths[id(module)][1]
