"""Calls functions one after the other, whatever they raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["call_all"]


def call_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call all functions. The last error is raised; its context has the earlier ones.

    No error is stored, as `contextlib.ExitStack` does: an error that a frame of its own traceback refers to lives until
    it is collected as garbage, with the tensors of all these frames.
    """
    _call_rest(iter(functions))


def _call_rest(functions: Iterator[Callable[[], object]]) -> None:
    function = next(functions, None)
    if function is not None:
        try:
            function()
        finally:
            _call_rest(functions)
