"""The device of a session: how its ops are timed and measured, which ops it may replay, and where work is queued.

`Device` is the CPU, the simple case; accelerator.py has the other kind. The rest of the runtime calls this interface
and never checks the type of the device.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torchdelta.aten.order import races_here
from torchdelta.native.counting import new_counter
from torchdelta.runtime.device.op_timer import HostTimer, OpTimer

if TYPE_CHECKING:
    import torch

    from torchdelta.aten.facts import OpFacts
    from torchdelta.errors import NativeError
    from torchdelta.native.counting import Counter
    from torchdelta.runtime.device.streams import Streams
    from torchdelta.runtime.state.need import Need
    from torchdelta.runtime.state.usage import Usage

__all__ = ["Device"]

_nothing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class Device:
    """The CPU: an op has run when its call returns, there is one queue, and every byte can be counted."""

    times_on_host = True  # whether a timer on the host measures how long ops take
    counts_exactly = True  # a request takes what it asks for, and the counter is cheap to ask
    sees_other_devices = False  # whether a session here may see tensors of other devices

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timer: OpTimer = HostTimer()
        self.streams: Streams | None = None  # None if there is one queue only

    def is_off(self) -> bool:
        """Return whether ops pass through unrecorded at the moment."""
        return False

    def new_counter(self) -> Counter | NativeError:
        """Return a counter at the allocator, or the error that explains why there is none."""
        return new_counter()

    def may_replay(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Return whether an op gives the same bits when it is replayed in this step."""
        return facts.is_recomputable and not (facts.may_race and races_here(facts.base_name, args, kwargs))

    # -- memory

    def begin_request(self, usage: Usage, size_bytes: int, budget_bytes: int) -> None:
        """Read the counter again if the latest reading is too old; update `usage.uncertain_bytes`."""

    def mark(self, need: Need, usage: Usage) -> None:
        """Start to measure what an op allocates, outputs included."""
        del need
        if usage.is_counting and usage.counter is not None:
            usage.counter.mark()

    def measure(self, need: Need, size_bytes: int, usage: Usage) -> int:
        """Learn what an op allocated besides its outputs of `size_bytes`; without a measurement keep the estimate.

        Returns:
            The bytes to reserve for its workspace on its next run.
        """
        if usage.is_counting and usage.counter is not None:
            workspace_bytes = usage.counter.growth_bytes() - size_bytes
            if need.is_workspace_known and workspace_bytes <= need.workspace_bytes:
                return need.workspace_bytes
            return need.learn_workspace(max(0, workspace_bytes))
        if need.workspace_bytes:
            usage.note_workspace(need.workspace_bytes)
        return need.workspace_bytes

    def margin_bytes(self, budget_bytes: int) -> int:
        """Return by how much more of the budget a step may take than an equal step has taken."""
        del budget_bytes
        return 0

    def unread_bytes(self, usage: Usage, budget_bytes: int) -> int:
        """Return by how many bytes the count may be too low before the counter is read again."""
        del usage, budget_bytes
        return 0

    # -- queues and threads

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which no other thread changes the session."""
        return _nothing

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for work on buffers: one thread at a time, on the stream that made them."""
        return _nothing
