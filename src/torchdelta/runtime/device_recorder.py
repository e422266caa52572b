"""The recorder on an accelerator: streams, captured graphs, threads of the autograd engine, and what may be replayed.

[Note: threads of the engine]
The autograd engine runs the nodes of an accelerator on a thread of its own for each device, while the thread that
called `backward()` waits. Torch carries its thread-local state over for each node: saved-tensor hooks, autocast,
dispatch modes (ours is off there, and each node's prehook pushes it on the very thread that runs the node), and the id
of the graph task. Python's `threading.local` is not carried over; `current_session` looks for the recorder on the mode
stack instead. A graph that has nodes on the CPU as well, or on two accelerators, runs on several threads at once, so
whatever changes the session in backward takes a lock: an op, an unpack, making room. In forward there is one thread,
and no lock: a survey runs a backward from inside an op. Deaths of storages take none, because a finalizer must never
wait; what they change are single numbers and dictionary entries.

[Note: captured graphs]
While a stream is captured into a CUDA graph, nothing may be evicted, asked of events or drawn from generators, and the
memory belongs to the graph's own pool. Ops pass through unrecorded, saved tensors stay as they are, and so does the
backward of a captured step. A graph that is replayed runs no ops that anybody could see.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch import graph_task_id
from torchdelta._torch_device import capture_reader
from torchdelta.aten.order import is_fixed_here
from torchdelta.runtime.device_counter import DeviceCounter
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.optime import NUM_SAMPLES, EventClock
from torchdelta.runtime.recorder import Recorder
from torchdelta.runtime.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.predict import Need
    from torchdelta.runtime.session import Session

__all__ = ["DeviceRecorder"]

# A copy from host memory is not run again: the program may have filled its staging buffer anew, through numpy or from
# another thread. A copy to the host would be read before it has arrived: who waited for it the first time is unknown.
_COPIES: Final = frozenset({"_to_copy", "copy_", "copy"})
# A forked child (a worker of a DataLoader) inherits the mode, but may not ask the accelerator for anything.
_is_child = False


def _note_fork() -> None:
    global _is_child  # noqa: PLW0603 - set once, in a process of one thread
    _is_child = True


os.register_at_fork(after_in_child=_note_fork)


class DeviceRecorder(Recorder):
    """Sees the ops of one thread in forward, and of the engine's threads in backward."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        device = session.ledger.device
        self.lock = threading.RLock()
        self.streams = Streams(device)
        self._is_capturing = capture_reader(device)
        self.clock = EventClock(device)
        self.predictor.tells_devices_apart = True
        self._is_abroad = False
        self._is_measuring = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. The signature is torch's."""
        if _is_child or self._is_capturing():
            return func(*args, **(kwargs or {}))
        if graph_task_id() == -1:
            return self._dispatch(func, types, args, kwargs)
        with self.lock:
            return self._dispatch(func, types, args, kwargs)

    def is_off(self) -> bool:
        """Say whether ops pass through unseen: in a forked child, and while a graph is captured."""
        return _is_child or self._is_capturing()

    @shielded
    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        streams = self.streams
        if streams.current_id() == streams.home_id:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self.session.num_handles == 0 and graph_task_id() == -1:
            # See [Note: the home stream], 3.
            streams.move_home()
            self.ledger.cut()
            self.residency.forget()
            return super().__torch_dispatch__(func, types, args, kwargs)
        was_abroad, self._is_abroad = self._is_abroad, True
        try:
            self._keep((*args, *kwargs.values()) if kwargs else args)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self._keep((out,))
            return out
        finally:
            self._is_abroad = was_abroad

    def _keep(self, values: Any) -> None:
        """Keep the buffers of tensors that an op on another stream reads or makes. See [Note: the home stream], 1."""
        for tensor in _tensors(values):
            if tensor.layout is not torch.strided or tensor.__class__ not in self.session.saved.plain_types:
                continue
            if graph_task_id() == -1:
                buffer = self.ledger.buffer_of(tensor)
            else:  # a storage object made in backward would cost the engine its in-place additions
                record = self.ledger.find(tensor)
                buffer = record.current if record is not None else None
                if buffer is None:
                    continue
            buffer.is_pinned = True
            if buffer in self.residency.leaving:
                self.residency.leaving.remove(buffer)

    def _mark(self, need: Need) -> None:
        self._is_measuring = need.timing is None or need.timing.num_samples < NUM_SAMPLES
        if self._is_measuring:
            super()._mark(need)

    def _measure_inside(self, need: Need, size_bytes: int) -> int:
        """Learn what an op has inside itself from its first few meetings; see [Note: active bytes]."""
        del size_bytes  # what is freed again is no output
        ledger = self.ledger
        counter = ledger.counter
        if self._is_measuring and ledger.is_counting and isinstance(counter, DeviceCounter) and need.timing is not None:
            freed_bytes = counter.freed_bytes()
            is_first = need.timing.num_samples <= 2  # the very first may have tuned algorithms: it is forgotten
            need.inside_bytes = freed_bytes if is_first else max(need.inside_bytes, freed_bytes)
            ledger.ask_counter(fresh=True)
        if need.inside_bytes:
            ledger.note_workspace(need.inside_bytes)
        return need.inside_bytes

    def can_replay(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Say whether an op gives the same bits when it is run again in this step."""
        if not facts.is_recomputable or self._is_abroad:
            return False
        if facts.base_name in _COPIES and _changes_device(args, kwargs):
            return False
        return not facts.order_varies or is_fixed_here(facts.base_name, args, kwargs)


def _changes_device(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    devices = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
    device = kwargs.get("device") if kwargs else None
    if device is not None:
        devices.add(torch.device(device))
    return len(devices) > 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, torch.Tensor))
