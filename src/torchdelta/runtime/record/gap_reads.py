"""Brings back what Python code reads between the nodes of a backward, where the recorder is off.

A dispatch mode there would change how the engine accumulates gradients (backward.py). A function mode does not: it sees
only what Python code calls, which is the program's hooks on tensors and nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torchdelta._torch.modes import FunctionMode, pop_function_mode, push_function_mode, top_function_mode
from torchdelta.runtime.interrupts import call_outside, enter, leave

if TYPE_CHECKING:
    from torchdelta.runtime.memory.persistents import Persistents

__all__ = ["GapReads", "is_attribute_access"]


class GapReads(FunctionMode):
    """Brings back the arguments of the torch functions that Python code calls."""

    def __init__(self, persistents: Persistents) -> None:
        super().__init__()
        self._persistents = persistents

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function. The signature is torch's."""
        del types
        persistents = self._persistents
        if is_attribute_access(func):
            return func(*args, **(kwargs or {}))
        outer = enter()
        try:
            persistents.begin(args, kwargs, may_write=True)
            try:
                return call_outside(func, *args, **(kwargs or {}))
            finally:
                persistents.end()
        finally:
            leave(outer)

    def begin_gap(self) -> None:
        """A gap begins."""
        push_function_mode(self)

    def end_gap(self) -> None:
        """The gap ends."""
        if top_function_mode() is self:
            pop_function_mode()


_VIEWS: Final = frozenset({"T", "H", "mT", "mH", "real", "imag"})


def is_attribute_access(func: Any) -> bool:
    """Return whether a function gets or sets an attribute that says nothing about the content, such as `p.grad`."""
    return (
        getattr(func, "__name__", "") in {"__get__", "__set__"} and getattr(func.__self__, "__name__", "") not in _VIEWS
    )
