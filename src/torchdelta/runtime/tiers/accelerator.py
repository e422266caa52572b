"""An engine for any accelerator, built on torch's generic interface: streams, events, `copy_`.

[Note: compute streams]
Almost every program computes on one stream per device. Autograd runs each backward node on the stream of its forward
op, on another thread. Therefore `Stream.COMPUTE` is the current stream of the calling thread. If a program calls from
several streams, each is remembered when it is first used. From then on a mark is recorded in all of them, and all of
them wait: more than needed, but correct without knowing which stream made which content.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import storage_over
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
        """Refuse: torch has no generic call that pins existing memory."""
        del address
        raise OSError(f"{self.device.type} has no call to pin {size_bytes} bytes of host memory")

    def unpin(self, address: int) -> None:
        """Do nothing: `pin` always refuses."""

    def mark(self, stream: Stream, *, is_timed: bool = False) -> tuple[torch.Event, ...]:
        """Record one event on each stream of the queue; that of the calling thread comes first."""
        events: list[torch.Event] = []
        for queue in self._queues(stream):
            event = torch.Event(self.device, enable_timing=is_timed)
            event.record(queue)
            events.append(event)
        return tuple(events)

    def follow(self, stream: Stream, event: tuple[torch.Event, ...]) -> None:
        """Make streams wait on the device; the host continues."""
        for queue in self._queues(stream):
            for one in event:
                one.wait(queue)

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy by torch's `copy_`, between tensors that do not own their memory."""
        target_device, source_device = (_HOST, self.device) if stream is Stream.OUT else (self.device, _HOST)
        with Quietly(), self.on_side(stream):
            target = _bytes_at(to_address, size_bytes, target_device)
            target.copy_(_bytes_at(from_address, size_bytes, source_device), non_blocking=True)

    def is_reached(self, event: tuple[torch.Event, ...]) -> bool:
        """Return whether all events of the mark were reached."""
        return all(one.query() for one in event)

    def finish(self, event: tuple[torch.Event, ...]) -> None:
        """Block the host; torch releases the GIL."""
        for one in event:
            one.synchronize()

    def elapsed_s(self, start: tuple[torch.Event, ...], end: tuple[torch.Event, ...]) -> float:
        """Return the difference of the device's time stamps."""
        return start[0].elapsed_time(end[0]) / 1e3

    @contextlib.contextmanager
    def on_side(self, stream: Stream) -> Generator[None]:
        """Make the stream of one direction, OUT or IN, current on this thread inside the context.

        `with stream` would store the previous stream in the stream object, which several threads share.
        """
        outside = torch.accelerator.current_stream(self.device.index)
        index = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(self._sides[stream])  # makes its device current, too
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
