"""Regions compiled by `torch.compile`: each is one opaque op whose memory need is measured.

A compiled region's kernels write buffers that no dispatch mode sees. So the recorder is off inside, outputs are kept or
swapped but never recomputed, and room is made for the region as a whole before it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.compiled import is_in_compiled_call, is_in_compiled_region
from torchdelta._torch.device import has_graph_trees
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import without_mode
from torchdelta._torch.tensors import storage_of
from torchdelta.runtime.device.memory import PeakMeter
from torchdelta.runtime.interrupts import call_outside, shielded
from torchdelta.runtime.record.unseen_writes import UnseenWrites, buffers_behind, statistics_in
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.kinds import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.runtime.errors import BudgetError
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.state.steps import StepTracker

_MAX_REGIONS: Final = 1024  # pairs of region and input shapes; beyond that the oldest is forgotten
# The first call compiles. After these calls the accelerator's peak, a counter of the whole process, is left alone.
_NUM_MEASURED_CALLS: Final = 3


class CompiledRegions:
    """Calls compiled regions with the recorder off, and learns how much memory each needs.

    Args:
        recorder: The dispatch mode that records.
        room: Makes room for a region.
        steps: The position in the training step.
        take_error: Ends the survey of an impossible step and returns its error.
    """

    def __init__(
        self, recorder: Recorder, room: Room, steps: StepTracker, take_error: Callable[[], BudgetError]
    ) -> None:
        self._recorder = recorder
        self._take_error = take_error
        self._room = room
        self._ledger = room.ledger
        self._steps = steps
        self._needed_bytes: dict[Any, int] = {}
        # What the first call took, compilation included. Used once, for the second call.
        self._first_bytes: dict[Any, int] = {}
        self._num_calls: dict[Any, int] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # of the functions, by id
        self._next_number = itertools.count()
        self._depth = 0  # of regions and functions that run in one another
        self._num_regions = 0  # of these

    def is_running(self) -> bool:
        """Return whether compiled code runs. A survey must not begin then: the next kernel would read fake tensors."""
        return is_in_compiled_call() or is_in_compiled_region()

    def end_survey(self) -> None:
        """Raise the error of a running survey, if there is one: compiled kernels cannot run on fake tensors.

        Raises:
            BudgetError: That of the survey.
        """
        if self._ledger.surveys:
            raise self._take_error()

    @shielded
    def call(self, original: Callable[..., Any], inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for `original(*args, **kwargs)`, the call of a compiled region, which is the first argument.

        `inputs` are the arguments that reach the compiled code, in tuples, lists and dicts.
        """
        room = self._room
        function: Any = args[0]
        tensors = list(tensors_in(inputs))
        key = (self._number_of(function), tuple(a.shape for a in tensors))
        with self._here(function, tensors):
            self._try_to_make(key, persistents=True)  # what the region reads is in use
            room.make(self._needed_bytes.get(key, 0), "a compiled region")
            self.end_survey()
            self._depth += 1
            self._num_regions += 1
            try:
                return self._call(original, key, tensors, args, kwargs)
            finally:
                self._num_regions -= 1
                self._depth -= 1

    def begin_function(self, function: Any, inputs: Any) -> Callable[[], None] | None:
        """Make room for a compiled function, as far as something can leave. Return what ends its call.

        Unlike a region it is recorded, because it may have eager parts. Those make room on their own, so nothing is
        refused here. What its kernels write is looked for at its end.
        """
        if self._num_regions:  # nothing inside is recorded, and what it writes is looked for at the end of the region
            return None
        args, kwargs = inputs
        writable = [*tensors_in(inputs), *buffers_behind(function, (*args, *kwargs.values()))]
        if self._depth or graph_task_id() != -1 or not self._ledger.usage.sees_peaks:
            return shielded(UnseenWrites(self._recorder, writable).end)
        key = (self._number_of(function), tuple(a.shape for a in tensors_in(inputs)))
        self._try_to_make(key)
        unseen = UnseenWrites(self._recorder, writable)
        meter = PeakMeter(self._ledger.device, self._ledger.usage, nests=True)
        meter.__enter__()
        self._depth += 1

        @shielded
        def end() -> None:
            self._depth -= 1
            meter.__exit__()
            self._learn(key, meter.extra_bytes)
            unseen.end()

        return end

    def _try_to_make(self, key: Any, *, persistents: bool = False) -> None:
        """Make room as far as something can leave."""
        if key in self._needed_bytes:
            size_bytes = max(self._needed_bytes[key], self._first_bytes.get(key, 0))
        else:
            size_bytes = self._scaled_bytes(*key)
        if size_bytes:
            self._room.try_to_make(size_bytes, persistents=persistents)

    def _scaled_bytes(self, number: int, shapes: tuple[torch.Size, ...]) -> int:
        """Estimate what a function needs for new shapes, from others that it was called with."""
        num_elements = sum(shape.numel() for shape in shapes)
        estimate_bytes = 0
        for (other, other_shapes), needed_bytes in self._needed_bytes.items():
            if other == number and len(other_shapes) == len(shapes):
                ratio = num_elements / max(1, sum(shape.numel() for shape in other_shapes))
                known_bytes = max(needed_bytes, self._first_bytes.get((other, other_shapes), 0))
                estimate_bytes = max(estimate_bytes, int(known_bytes * ratio))
        return estimate_bytes

    def _learn(self, key: Any, measured_bytes: int, outputs_bytes: int = 0) -> None:
        """Learn what a call has needed. The first one may compile, which takes memory that later ones do not."""
        if key in self._needed_bytes:
            self._first_bytes.pop(key, None)
        else:
            if len(self._needed_bytes) >= _MAX_REGIONS:
                oldest = next(iter(self._needed_bytes))
                del self._needed_bytes[oldest]
                self._num_calls.pop(oldest, None)
                self._first_bytes.pop(oldest, None)
            self._first_bytes[key], measured_bytes = measured_bytes, 0
        self._needed_bytes[key] = max(self._needed_bytes.get(key, 0), measured_bytes, outputs_bytes)

    @contextlib.contextmanager
    def _here(self, function: Any, tensors: list[torch.Tensor]) -> Generator[None]:
        """Bring back the persistent tensors that a region reads, and keep them here."""
        persistents = self._room.persistents
        if persistents is None:
            yield
            return
        is_module = isinstance(function, torch.nn.Module)
        if is_module:
            persistents.compiled.begin(with_states=False)
        try:
            persistents.begin(tensors, may_write=True)
            try:
                yield
            finally:
                persistents.end()
        finally:
            if is_module:
                persistents.compiled.end()

    def _call(
        self,
        original: Callable[..., Any],
        key: Any,
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        ledger, room = self._ledger, self._room
        ledger.clock += 1
        observer = ledger.observing.observer
        observer.on_opaque_start(tensors)
        num_calls = self._num_calls[key] = self._num_calls.get(key, 0) + 1
        resets = num_calls <= _NUM_MEASURED_CALLS
        others = (*args[1:], *kwargs.values())
        writable = [*tensors, *buffers_behind(args[0], others)]
        with without_mode(self._recorder), PeakMeter(ledger.device, ledger.usage, resets=resets) as meter:
            unseen = UnseenWrites(self._recorder, writable, statistics_in((args[0], *others)))
            try:
                out = call_outside(original, *args, **kwargs)
            finally:  # what it has written before an error is written
                unseen.end()
        before_bytes = ledger.usage.live_bytes
        self._know(out)
        outputs_bytes = ledger.usage.live_bytes - before_bytes
        self._learn(key, meter.extra_bytes, outputs_bytes)
        workspace_bytes = max(0, meter.extra_bytes - outputs_bytes)
        observer.on_opaque_end("torchdelta.compiled", out, node=self._steps.node_name, workspace_bytes=workspace_bytes)
        ledger.usage.ask_counter(fresh=True)  # one call with any number of outputs
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
        for tensor in tensors_in(out):
            if tensor.__class__ is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            if graph_task_id() != -1 and not torch.is_grad_enabled():
                ledger.know_by_tensor(tensor)
            elif (storage := storage_of(tensor)) is not None:  # torch.func's wrappers have none
                ledger.know(storage)
                if has_graph_trees():  # a CUDA graph owns the memory and reuses it: evicting would free nothing
                    ledger.stay(ledger.buffer_of(tensor), Stays.NOT_OURS)
