"""Sees what the program's Python code writes in a backward while the recorder is off.

The recorder is off between the nodes of a backward, and during all of a backward without hooks on its nodes
(headroom.py). Python code runs there: hooks on tensors and nodes, the backward of custom Functions, and what
checkpoints recompute. It may write a tensor that a replay reads later in the same backward, and the replay needs the
content from before that write. So a function mode is on: it is called for each torch function that Python code calls,
and for nothing else. A dispatch mode, which is on during such a call, finds the ops that write, including those that
write through `.data`.

Not seen are writes by TorchScript, by C++ extensions, by collectives, by NumPy, and by threads that a hook starts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.modes import (
    DispatchMode,
    FunctionMode,
    mode_stack,
    pop_function_mode,
    pop_mode,
    push_function_mode,
    push_mode,
    remove_function_mode,
    top_function_mode,
)
from torchdelta._torch.ops import OpOverload, execute
from torchdelta.aten.facts import facts_of, written_tensors
from torchdelta.runtime.record.capture import statistics_of
from torchdelta.runtime.record.gap_reads import is_attribute_access
from torchdelta.runtime.state.kinds import addressed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.record.recorder import Recorder

__all__ = ["PythonWrites"]

# They start a backward: a dispatch mode would change how the engine accumulates there. See `Backward.run_nested`.
_RUNS_ENGINE: Final = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class PythonWrites(FunctionMode):
    """Gives the recorder the ops of Python code that write what replays may read.

    Args:
        recorder: Records them.
        before_record: Called before it does.
    """

    def __init__(self, recorder: Recorder, before_record: Callable[[], object]) -> None:
        super().__init__()
        self.before_write: Callable[..., None] | None = None  # tells the native tape, if there is one
        self.num_backwards = 0  # those for which this is on now
        self._recorder = recorder
        self._writers = _Writers(recorder, self, before_record)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function. The signature is torch's."""
        del types
        if torch.compiler.is_compiling():  # Dynamo traces this for a function that a hook calls
            return func(*args, **(kwargs or {}))
        if is_attribute_access(func) or func in _RUNS_ENGINE or self._recorder in mode_stack():
            return func(*args, **(kwargs or {}))
        push_mode(self._writers)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            pop_mode()

    @contextlib.contextmanager
    def on(self) -> Generator[None]:
        """Be on during a backward, which may be inside of another one."""
        if top_function_mode() is self:
            yield
            return
        push_function_mode(self)
        self.num_backwards += 1
        try:
            yield
        finally:
            self.num_backwards -= 1
            remove_function_mode(self)

    def begin_program(self) -> None:
        """Be on from here on: code of the program runs next. Only in a backward for which it is on."""
        if self.num_backwards:
            push_function_mode(self)

    def begin_library(self) -> None:
        """Be off from here on: the library itself calls torch functions next, or the recorder goes on."""
        if top_function_mode() is self:
            pop_function_mode()

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        """Be off for a while, if it is on: the library or compiled code calls torch functions."""
        was_on = top_function_mode() is self
        if was_on:
            pop_function_mode()
        try:
            yield
        finally:
            if was_on:
                push_function_mode(self)


class _Writers(DispatchMode):
    """Gives an op to the recorder if it writes a known storage, or if it is that of a tensor subclass."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder, writes: PythonWrites, before_record: Callable[[], object]) -> None:
        super().__init__()
        self._recorder = recorder
        self._writes = writes
        self._before_record = before_record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. The signature is torch's."""
        if not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        facts = facts_of(func)
        writes_known = self._writes_known(facts, args, kwargs)
        if not types and not writes_known:
            return execute(func, facts, args, kwargs)
        self._before_record()
        push_mode(self._recorder)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            pop_mode()

    def _writes_known(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        if facts.keeps_statistics:
            written = statistics_of(facts, args)
        elif facts.writes_content:
            written = written_tensors(facts, args, kwargs)
        else:
            return False
        found = facts.bumps_inside  # torch does not count these writes under a dispatch mode, but the recorder does
        for address, tensor in addressed(written):
            if self._writes.before_write is not None:
                self._writes.before_write(tensor)
            record = self._recorder.ledger.records.get(address)
            found = found or (record is not None and record.current is not None)
        return found
