"""Sees what the program's Python code writes in a backward where the recorder is off.

The recorder is off between the nodes of a backward, and in all of an unwatched one. Python code runs there in hooks on
tensors and nodes, in the backward of custom Functions, and where checkpoints recompute. What it writes may be read by a
replay later in the same backward, so the old content has to be kept before. A function mode finds the calls of such
code, which costs nothing where there is none. A dispatch mode that is on for the call finds what the call writes,
including writes through `.data`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.modes import (
    FunctionMode,
    TorchDispatchMode,
    pop_function_mode,
    push_function_mode,
    remove_function_mode,
    top_function_mode,
    top_mode,
)
from torchdelta.aten.facts import Kind, facts_of, written_tensors
from torchdelta.runtime.record.gap_reads import is_attribute_access

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.runtime.record.recorder import Recorder

__all__ = ["PythonWrites"]

# They start a backward: a dispatch mode would change how the engine accumulates there. See `run_nested`.
_RUNS_ENGINE: Final = frozenset({torch.Tensor.backward, torch.autograd.grad})


class PythonWrites(FunctionMode):
    """Records ops of the program's Python code that write what the ledger or the tape knows.

    Args:
        recorder: Records them.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.before_write: Callable[[torch.Tensor], None] | None = None  # tells the native tape, if there is one
        self.is_off = False  # Dynamo would compile functions again that hooks call under a function mode
        self._num_backwards = 0
        self._recorder = recorder
        self._watch = _Watch(recorder, self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function. The signature is torch's."""
        del types
        if is_attribute_access(func) or func in _RUNS_ENGINE or top_mode() is self._recorder:
            return func(*args, **(kwargs or {}))
        with self._watch:
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Watch a backward, which may be inside of another one."""
        if self.is_off or top_function_mode() is self:
            yield
            return
        push_function_mode(self)
        self._num_backwards += 1
        try:
            yield
        finally:
            self._num_backwards -= 1
            remove_function_mode(self)

    def begin_gap(self) -> None:
        """Go on after a node of a backward whose nodes run under the recorder."""
        if self._num_backwards and not self.is_off:
            push_function_mode(self)

    def end_gap(self) -> None:
        """Watch nothing from here on: a node runs, or the library itself."""
        if top_function_mode() is self:
            pop_function_mode()

    def run_nested(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward that Python code starts inside of a watched one."""
        if not self._num_backwards:
            return original(outputs, *args, **kwargs)
        with self.watching():
            return original(outputs, *args, **kwargs)


class _Watch(TorchDispatchMode):
    """Gives an op to the recorder if it writes a known storage, or belongs to a tensor subclass."""

    def __init__(self, recorder: Recorder, writes: PythonWrites) -> None:
        super().__init__()
        self._recorder = recorder
        self._writes = writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. The signature is torch's."""
        if types or self._may_write_known(func, args, kwargs):
            with self._recorder:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _may_write_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        facts = facts_of(func)
        if facts.keeps_statistics:
            return True
        if facts.kind not in (Kind.WRITE, Kind.REPLACE):
            return False
        found = False
        for tensor in written_tensors(facts, args, kwargs):
            if self._writes.before_write is not None:
                self._writes.before_write(tensor)
            record = self._recorder.ledger.find(tensor)
            found = found or (record is not None and record.current is not None)
        return found
