"""An accelerator: streams, captured graphs, threads of the autograd engine, and a caching allocator.

[Note: threads of the engine]
The autograd engine runs the nodes of each accelerator on a separate thread, while the thread that called `backward()`
waits. For each node torch restores the thread-local state of the forward: saved-tensor hooks, autocast, dispatch modes
(ours is off there; each node's prehook pushes it on the thread that runs the node), and the id of the graph task.
Python's `threading.local` is not restored; `current_session` searches the mode stack for the recorder instead. A graph
with nodes on the CPU as well, or on two accelerators, runs on several threads at once. Therefore all code that changes
the session in backward takes a lock: an op, an unpack, making room. In forward there is one thread and no lock: a
survey runs a backward from inside an op. The death of a storage takes no lock, because a finalizer must never block; it
changes only single numbers and dictionary entries.

[Note: captured graphs]
While a stream is captured into a CUDA graph, no buffer may be evicted, no event queried and no random generator used,
and the memory belongs to the graph's own pool. Ops pass through unrecorded and saved tensors are kept unchanged, also
in the backward of a captured step. A replayed graph runs no ops that a dispatch mode could see.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import can_watch_allocator, capture_reader
from torchdelta.aten.order import is_fixed_here
from torchdelta.native.device_watch import new_watch
from torchdelta.runtime.device.counter import DeviceCounter
from torchdelta.runtime.device.device import Device
from torchdelta.runtime.device.op_timer import NUM_SAMPLES, EventTimer
from torchdelta.runtime.device.reserve import LARGEST_SHARE, Reserve
from torchdelta.runtime.device.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Generator

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.state.need import Need
    from torchdelta.runtime.state.usage import Usage

__all__ = ["Accelerator"]

# A copy from host memory is not replayed: the program may have overwritten its staging buffer, through numpy or on
# another thread. Nor is a copy to the host: it could be read before it arrives, since nothing waits for the replay.
_COPIES: Final = frozenset({"_to_copy", "copy_", "copy"})
# With `torch.backends.cudnn.benchmark`, cuDNN times its algorithms and takes the fastest, for each thread on its own. A
# replay runs on a thread of autograd's, may take another one, and then gives other bits.
_TUNED: Final = frozenset({"convolution", "convolution_overrideable", "_convolution"})
# The most that CUDA's caching allocator may add: a small block is rounded up to 512 bytes (for a few outputs), and a
# large one takes the rest of its block if that is small.
_ROUNDING_BYTES: Final = 4 * 512
_LARGE_BYTES: Final = 1 << 20

_MARGIN_SHARE: Final = 1000  # of the budget; see `margin_bytes`

# A forked child (a DataLoader worker) inherits the dispatch mode, but may not use the accelerator.
_is_child = False


def _note_fork() -> None:
    global _is_child  # noqa: PLW0603 - set once, in a process of one thread
    _is_child = True


os.register_at_fork(after_in_child=_note_fork)


class Accelerator(Device):
    """A device with streams, an allocator with statistics, and separate autograd threads."""

    times_on_host = False
    counts_exactly = False
    sees_other_devices = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.timer = EventTimer(device)
        self.streams = self._streams = Streams(device)
        self._lock = threading.RLock()
        self.is_capturing = capture_reader(device)
        self._is_measuring = False
        self._reserve = Reserve()

    def is_off(self) -> bool:
        """Return whether ops pass through unrecorded: in a forked child, and while a graph is captured."""
        return _is_child or self.is_capturing()

    def new_counter(self) -> DeviceCounter:
        """Return a reader of the allocator's statistics; for the main thread, where limits call back, with a watch."""
        is_main = threading.current_thread() is threading.main_thread()  # a device has one limit
        is_watched = is_main and can_watch_allocator(self.device)
        return DeviceCounter(self.device, new_watch(self.device) if is_watched else None)

    def may_replay(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Return whether an op gives the same bits when it is replayed in this step."""
        if not facts.is_recomputable or self._streams.is_on_other_stream:
            return False
        if facts.base_name in _COPIES and _changes_device(args, kwargs):
            return False
        if facts.base_name in _TUNED and torch.backends.cudnn.benchmark:
            return False
        return not facts.order_varies or is_fixed_here(facts.base_name, args, kwargs)

    def begin_request(self, usage: Usage, size_bytes: int, budget_bytes: int) -> None:
        """Read the allocator if the latest reading is too old. See [Note: reading seldom] in reserve.py."""
        rounding_bytes = _ROUNDING_BYTES if size_bytes <= _LARGE_BYTES else _LARGE_BYTES
        self._reserve.add(usage, rounding_bytes, budget_bytes)

    def mark(self, need: Need, usage: Usage) -> None:
        """Start to measure an op, on its first few runs only: reading the allocator's statistics is expensive."""
        self._is_measuring = need.timing is None or need.timing.num_samples < NUM_SAMPLES
        if self._is_measuring:
            usage.mark()

    def measure(self, need: Need, size_bytes: int, usage: Usage) -> int:
        """Learn an op's workspace from its first few runs; see [Note: active bytes] in counter.py."""
        counter = usage.counter
        if self._is_measuring and usage.is_counting and isinstance(counter, DeviceCounter) and need.timing is not None:
            # What was freed is no output.
            grown_bytes = counter.growth_bytes() - size_bytes if counter.sees_peaks else counter.freed_bytes()
            taken_bytes = max(0, grown_bytes)
            is_first = need.timing.num_samples <= 2  # the first run may have tuned algorithms: discard it
            need.workspace_bytes = taken_bytes if is_first else max(need.workspace_bytes, taken_bytes)
            usage.ask_counter(fresh=True)
        need.possible_bytes = 0  # of tensors on the CPU, which this budget does not limit
        if need.workspace_bytes:
            usage.note_workspace(need.workspace_bytes)
        return need.workspace_bytes

    def margin_bytes(self, budget_bytes: int) -> int:
        """Return what blocks may hold more in one step than in another that is like it: they are split differently."""
        return budget_bytes // _MARGIN_SHARE

    def unread_bytes(self, usage: Usage, budget_bytes: int) -> int:
        """Return by how much the rounding of blocks may exceed the count before the allocator is read again."""
        missed_bytes = usage.counter.most_missed_bytes if isinstance(usage.counter, DeviceCounter) else 0
        return max(int(budget_bytes * LARGEST_SHARE), missed_bytes)

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock of [Note: threads of the engine]."""
        return self._lock

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None]:
        """Take the lock, and queue the work inside the context on the home stream."""
        with self._lock, self._streams.at_home():
            yield


def _changes_device(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    devices = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
    device = kwargs.get("device") if kwargs else None
    if device is not None:
        devices.add(torch.device(device))
    return len(devices) > 1
