"""Finds what code that is not recorded writes in place, such as the kernels of a compiled function.

The tensors that it may write are looked at before and after it: a version that has changed tells of a write. They are
its arguments and what `buffers_behind` finds.

Not found are writes to tensors that it reaches in another way (a list in its closure, an attribute of an object), those
through `.data` inside of it, which no version shows, and those to a tensor that an eager part of it writes as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.nn.parameter import is_lazy

from torchdelta._torch.tensors import version_of
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.state.buffer import Residence
from torchdelta.runtime.state.kinds import addressed, runs_own_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.record.subclasses import Subclasses
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["RecordsWrites", "UnseenWrites", "begins_unseen_writes", "buffers_behind", "statistics_in"]

_ORIGIN: Final = "torchdelta.compiled"
_STATISTICS: Final = "running_mean"  # of torch's norms, and of what imitates them


class RecordsWrites(Protocol):
    """What is needed of the recorder here."""

    @property
    def ledger(self) -> Ledger:
        """Knows the contents of storages."""
        ...

    @property
    def room(self) -> Room:
        """Knows the transfers, and what replays need."""
        ...

    @property
    def saved(self) -> SavedTensors:
        """The saved tensors, which follow writes."""
        ...

    @property
    def subclasses(self) -> Subclasses:
        """Dispatches the ops of tensor subclasses."""
        ...

    def end_content(self, tensor: torch.Tensor, /) -> Buffer | None:
        """End the content of a storage that is about to be written."""
        ...


class UnseenWrites:
    """Finds the plain tensors that unrecorded code wrote: compares their versions before and after it.

    Args:
        recorder: Sees all other writes.
        tensors: What that code may write.
        statistics: What it writes although no version shows that.
    """

    def __init__(
        self, recorder: RecordsWrites, tensors: Iterable[torch.Tensor], statistics: Iterable[torch.Tensor] = ()
    ) -> None:
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._statistics = list(statistics)
        self._before: list[tuple[torch.Tensor, int, Buffer]] = []
        for tensor in self._statistics:
            if self._content_of(tensor) is not None:
                recorder.end_content(tensor)
        for tensor in tensors:
            content = self._content_of(tensor)
            if content is not None:
                recorder.room.transfers.finish_copy(content)
                self._before.append((tensor, version_of(tensor), content))

    def end(self) -> None:
        """End the recorded content of tensors whose version changed.

        The old content is recomputed if a recorded op made it; otherwise reading it is an error.
        """
        for tensor, version, before in self._before:
            if version_of(tensor) != version and self._content_of(tensor) is before:
                self._end_content(tensor, before)
        for tensor in self._statistics:
            content = self._content_of(tensor)
            if content is not None:  # autograd saved it, perhaps before it was written
                self._end_content(tensor, content)

    def _content_of(self, tensor: torch.Tensor) -> Buffer | None:
        """Return what is recorded of a plain tensor's content; None if nothing is."""
        try:
            record = self._ledger.find(tensor)
        except RuntimeError:  # it has no storage, inside `vmap` for example
            return None
        if record is None or record.current is None:
            return None
        is_plain = not runs_own_ops(tensor.__class__) and tensor.layout is torch.strided and not tensor.is_inference()
        return record.current if is_plain else None

    def _end_content(self, tensor: torch.Tensor, old: Buffer) -> None:
        if old.record is not None:
            self._ledger.invalidate(old.record)
        if old.residence is Residence.GONE:
            self._recorder.room.costs.note_lost(old)
        buffer = self._ledger.written(tensor, old, None, _ORIGIN, 0)
        if buffer.num_saved:
            self._recorder.saved.on_resaved(buffer)


def begins_unseen_writes(recorder: RecordsWrites) -> Callable[[list[torch.Tensor]], Callable[[], None]]:
    """Return a function for the gate.

    The gate calls it before an op that no mode sees writes tensors, and calls what it returns after the op. A tensor
    subclass runs such an op with dispatch disabled. Later steps are recorded as a whole, because the recorder
    sees the op that the subclass handles.

    Args:
        recorder: Sees all other writes.
    """

    @shielded
    def begin(tensors: list[torch.Tensor]) -> Callable[[], None]:
        recorder.subclasses.were_met = True
        return shielded(UnseenWrites(recorder, (), [part for _, part in addressed(tensors)]).end)

    return begin


def buffers_behind(function: Any, arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a function may write besides those among its arguments.

    They are the buffers of the module that it is or is a method of, those of modules among its arguments, and those of
    modules, and the tensors, that a global name or a variable of its closure refers to. Parameters are not among them:
    they have no op, so that a replay that reads one finds out by itself whether it was written.
    """
    for thing in (getattr(function, "__self__", function), *arguments):
        if isinstance(thing, torch.nn.Module):
            yield from _buffers_of(thing)
    for thing in _named_by(function):
        if isinstance(thing, torch.nn.Module):
            yield from _buffers_of(thing)
        elif isinstance(thing, torch.Tensor):
            yield thing


def _named_by(function: Any) -> Iterator[Any]:
    """Yield what a Python function refers to by a global name or by a variable of its closure."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    names = function.__globals__
    yield from (names[name] for name in code.co_names if name in names)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def statistics_in(things: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the buffers that norms write in training mode. A batch norm does not bump versions."""
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            for part in _parts_of(thing):
                buffers = part["_buffers"]
                if buffers and part.get("training") and buffers.get(_STATISTICS) is not None:
                    yield from _known(buffers)


def _buffers_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in _parts_of(module):
        if part["_buffers"]:
            yield from _known(part["_buffers"])


def _known(buffers: dict[str, torch.Tensor | None]) -> Iterator[torch.Tensor]:
    return (buffer for buffer in buffers.values() if buffer is not None and not is_lazy(buffer))


def _parts_of(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a module and of each one in it. It is faster than `modules()` and `buffers()`."""
    waiting: list[Any] = [module]
    seen: set[int] = {id(None)}
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            attributes = vars(part)
            if "_modules" in attributes and "_buffers" in attributes:  # else its __init__ has not run, or C++ has them
                waiting += attributes["_modules"].values()
                yield attributes
