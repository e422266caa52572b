"""An accelerator behind the tiers' seam, by what torch has for all of them alike: streams, events, `copy_`.

[Note: compute streams]
Almost every program computes on one stream per device, and autograd runs each backward node, on a thread of its own,
on the stream of its forward op. Therefore `Stream.COMPUTE` is the current stream of the calling thread. A program that
calls from several has each of them noted here when it first shows up, and from then on a mark stands in all of them
and all of them wait: more than needed, and right without knowing which stream made what.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torchdelta._torch import Quietly, storage_over
from torchdelta.runtime.tiers.engine import Stream

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["AcceleratorEngine"]

_HOST = torch.device("cpu")


class AcceleratorEngine:
    """One device of any kind that torch knows; see `engine.Engine`.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides = {stream: torch.Stream(device) for stream in (Stream.OUT, Stream.IN)}
        self._computes: dict[int, torch.Stream] = {}  # by id; [Note: compute streams]

    def pin(self, address: int, size_bytes: int) -> None:
        """Refuse: torch has no way to pin memory of ours that is the same for all."""
        del address
        raise OSError(f"{self.device.type} has no call to pin {size_bytes} bytes of host memory")

    def unpin(self, address: int) -> None:
        """Nothing is pinned."""

    def mark(self, stream: Stream, *, is_timed: bool = False) -> tuple[torch.Event, ...]:
        """Record events, one on each stream that is meant; the calling thread's own comes first."""
        events: list[torch.Event] = []
        for queue in self._queues(stream):
            event = torch.Event(self.device, enable_timing=is_timed)
            event.record(queue)
            events.append(event)
        return tuple(events)

    def follow(self, stream: Stream, event: tuple[torch.Event, ...]) -> None:
        """Let streams wait on the device; the host goes on."""
        for queue in self._queues(stream):
            for one in event:
                one.wait(queue)

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy by torch's own `copy_`, between tensors that own nothing."""
        target_device, source_device = (_HOST, self.device) if stream is Stream.OUT else (self.device, _HOST)
        with Quietly(), self._current(self._sides[stream]):
            target = _bytes_at(to_address, size_bytes, target_device)
            target.copy_(_bytes_at(from_address, size_bytes, source_device), non_blocking=True)

    def is_reached(self, event: tuple[torch.Event, ...]) -> bool:
        """Ask all of an event's marks."""
        return all(one.query() for one in event)

    def finish(self, event: tuple[torch.Event, ...]) -> None:
        """Block; torch leaves the interpreter to others meanwhile."""
        for one in event:
            one.synchronize()

    def elapsed_s(self, start: tuple[torch.Event, ...], end: tuple[torch.Event, ...]) -> float:
        """Subtract the device's time stamps."""
        return start[0].elapsed_time(end[0]) / 1e3

    @contextlib.contextmanager
    def _current(self, stream: torch.Stream) -> Generator[None]:
        """Make a stream of the device current on this thread for a while.

        Not by `with stream`: it keeps what was current before in the stream object, which other threads enter as well.
        """
        outside = torch.accelerator.current_stream(self.device.index)
        index = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)  # makes its device current, too
        try:
            yield
        finally:
            torch.accelerator.set_stream(outside)
            torch.accelerator.set_device_index(index)

    def _queues(self, stream: Stream) -> list[torch.Stream]:
        if stream is not Stream.COMPUTE:
            return [self._sides[stream]]
        current = torch.accelerator.current_stream(self.device.index)
        self._computes.setdefault(current.stream_id, current)
        if len(self._computes) == 1:
            return [current]
        return [current, *(other for key, other in list(self._computes.items()) if key != current.stream_id)]


def _bytes_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    storage = storage_over(address, size_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
