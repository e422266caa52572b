"""Regions compiled by `torch.compile`: each is one opaque op whose memory need is measured.

A compiled region's kernels write buffers that no dispatch mode sees. So the recorder is off inside, outputs are kept or
swapped but never recomputed, and room is made for the region as a whole before it runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import has_graph_trees
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import without_mode
from torchdelta._torch.tensors import storage_of
from torchdelta.runtime.device.memory import PeakMeter
from torchdelta.runtime.interrupts import call_outside, shielded
from torchdelta.runtime.record.unseen_writes import UnseenWrites
from torchdelta.runtime.state.buffer import Stays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta._torch.modes import TorchDispatchMode
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.steps import StepTracker

_MAX_REGIONS: Final = 1024  # pairs of region and input shapes; beyond that the oldest is forgotten
# The first call compiles. After these calls the accelerator's peak, a counter of the whole process, is left alone.
_NUM_MEASURED_CALLS: Final = 3


class CompiledRegions:
    """Calls compiled regions with the recorder off, and learns how much memory each needs."""

    def __init__(self, recorder: TorchDispatchMode, room: Room, steps: StepTracker) -> None:
        self._recorder = recorder
        self._room = room
        self._ledger = room.ledger
        self._steps = steps
        self._needed_bytes: dict[Any, int] = {}
        self._num_calls: dict[Any, int] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # of the functions, by id
        self._next_number = itertools.count()

    @shielded
    def call(self, original: Callable[..., Any], inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for `original(*args, **kwargs)`, the call of a compiled region, which is the first argument.

        `inputs` are the arguments that reach the compiled code, in tuples, lists and dicts.
        """
        ledger, room = self._ledger, self._room
        function: Any = args[0]
        tensors = list(_tensors_in(inputs))
        key = (self._number_of(function), tuple(a.shape for a in tensors))
        room.make(self._needed_bytes.get(key, 0), "a compiled region")
        ledger.clock += 1
        observer = ledger.observing.observer
        observer.on_opaque_start(tensors)
        num_calls = self._num_calls[key] = self._num_calls.get(key, 0) + 1
        resets = num_calls <= _NUM_MEASURED_CALLS
        with without_mode(self._recorder), PeakMeter(ledger.device, ledger.usage, resets=resets) as meter:
            unseen = UnseenWrites(ledger, room, tensors)
            out = call_outside(original, *args, **kwargs)
            unseen.end()
        before_bytes = ledger.usage.live_bytes
        self._know(out)
        outputs_bytes = ledger.usage.live_bytes - before_bytes
        # The first call may compile, which takes memory that later calls do not: only its outputs are learned.
        measured_bytes = meter.extra_bytes if key in self._needed_bytes else 0
        if len(self._needed_bytes) >= _MAX_REGIONS:
            oldest = next(iter(self._needed_bytes))
            del self._needed_bytes[oldest], self._num_calls[oldest]
        self._needed_bytes[key] = max(self._needed_bytes.get(key, 0), outputs_bytes, measured_bytes)
        workspace_bytes = max(0, meter.extra_bytes - outputs_bytes)
        observer.on_opaque_end("torchdelta.compiled", out, node=self._steps.node_name, workspace_bytes=workspace_bytes)
        room.make(0, "a compiled region")
        return out

    def _number_of(self, function: Any) -> int:
        """Return a number of a function's own. Its id would be another function's once this one is dead."""
        known = self._numbers.get(id(function))
        if known is not None and known[0]() is function:
            return known[1]
        number = next(self._next_number)
        if len(self._numbers) >= _MAX_REGIONS:
            self._numbers = {key: value for key, value in self._numbers.items() if value[0]() is not None}
        try:
            self._numbers[id(function)] = (weakref.ref(function), number)
        except TypeError:  # it cannot be referred to weakly: each call is the first one
            self._numbers.pop(id(function), None)
        return number

    def _know(self, out: Any) -> None:
        ledger = self._ledger
        if isinstance(out, torch.Tensor):
            if out.__class__ is not torch.Tensor or out.layout is not torch.strided:
                return
            if graph_task_id() != -1 and not torch.is_grad_enabled():
                ledger.know_by_tensor(out)
            elif (storage := storage_of(out)) is not None:  # torch.func's wrappers have none
                ledger.know(storage)
                if has_graph_trees():  # a CUDA graph owns the memory and reuses it: evicting would free nothing
                    ledger.stay(ledger.buffer_of(out), Stays.NOT_OURS)
        elif isinstance(out, list | tuple):
            for item in out:
                self._know(item)
        elif isinstance(out, Mapping):  # ModelOutput of transformers
            for item in out.values():
                self._know(item)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
