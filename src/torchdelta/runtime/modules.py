"""Which module is running: its path, for the trace and for `decisions`.

On only where somebody asks: hooks on every module call cost.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as nn_module

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


class ModuleTracker:
    """Knows the path of the module whose forward is running, such as "transformer.h.0.attn"."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._root: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._thread_id = 0  # the hooks are global: modules of other threads are not ours

    @property
    def current(self) -> str:
        """The path, empty outside of all modules and while tracking is off."""
        return self._stack[-1] if self._stack else ""

    def start(self) -> None:
        """Begin to follow module calls."""
        if not self._handles:
            self._thread_id = threading.get_ident()
            self._handles = [
                nn_module.register_module_forward_pre_hook(self._enter),
                nn_module.register_module_forward_hook(self._leave, always_call=True),
            ]

    def stop(self) -> None:
        """Stop following module calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _enter(self, module: Module, _args: Any) -> None:
        if threading.get_ident() != self._thread_id:
            return
        if not self._stack:
            names = self._names.get(module)
            if names is None:
                names = {id(child): name for name, child in module.named_modules()}
                self._names[module] = names
            self._root = names
        self._stack.append(self._root.get(id(module), type(module).__name__))

    def _leave(self, _module: Module, _args: Any, _output: Any) -> None:
        if self._stack and threading.get_ident() == self._thread_id:
            self._stack.pop()
