"""A CUDA device behind the tiers' seam: two streams of its own, torch's events, and memory registered by address.

[Note: compute streams]
Almost every program computes on one stream per device, and autograd runs each backward node, on a thread of its own,
on the stream of its forward op. Therefore `Stream.COMPUTE` is the current stream of the calling thread. A program that
computes on several has each of them noted here when it first shows up, and from then on a mark stands in all of them
and all of them wait: more than needed, and right without knowing which stream made what.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch

from torchdelta._torch import Quietly, storage_over
from torchdelta.runtime.tiers.engine import Stream

__all__ = ["CudaEngine"]

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of this process


class CudaEngine:
    """One CUDA device; see `engine.Engine`.

    Args:
        device: With its index; None is the current device of the calling thread.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._sides = {stream: torch.cuda.Stream(self.device) for stream in (Stream.OUT, Stream.IN)}
        self._computes: dict[int, torch.cuda.Stream] = {}  # by handle, the latest first asked; [Note: compute streams]

    def pin(self, address: int, size_bytes: int) -> None:
        """Register host memory."""
        runtime: Any = torch.cuda.cudart()
        status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
        if int(status) != 0:
            self._forget_error()
            raise OSError(f"cudaHostRegister of {size_bytes} bytes: {runtime.cudaGetErrorString(status)}")

    def unpin(self, address: int) -> None:
        """Take the registration back."""
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostUnregister(address)) != 0:
            self._forget_error()

    def mark(self, stream: Stream, *, is_timed: bool = False) -> tuple[torch.cuda.Event, ...]:
        """Record events, one on each stream that is meant; the calling thread's own comes first."""
        events: list[torch.cuda.Event] = []
        for queue in self._queues(stream):
            event = torch.cuda.Event(enable_timing=is_timed)
            event.record(queue)
            events.append(event)
        return tuple(events)

    def follow(self, stream: Stream, event: tuple[torch.cuda.Event, ...]) -> None:
        """Let streams wait on the device; the host goes on."""
        for queue in self._queues(stream):
            for one in event:
                one.wait(queue)

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy by torch's own `copy_`, between tensors that own nothing."""
        host, device = torch.device("cpu"), self.device
        target_device, source_device = (host, device) if stream is Stream.OUT else (device, host)
        with Quietly(), torch.cuda.stream(self._sides[stream]):
            target = _bytes_at(to_address, size_bytes, target_device)
            target.copy_(_bytes_at(from_address, size_bytes, source_device), non_blocking=True)

    def is_reached(self, event: tuple[torch.cuda.Event, ...]) -> bool:
        """Ask all of an event's marks."""
        return all(one.query() for one in event)

    def finish(self, event: tuple[torch.cuda.Event, ...]) -> None:
        """Block; torch gives the interpreter free meanwhile."""
        for one in event:
            one.synchronize()

    def elapsed_s(self, start: tuple[torch.cuda.Event, ...], end: tuple[torch.cuda.Event, ...]) -> float:
        """Subtract the device's time stamps."""
        return start[0].elapsed_time(end[0]) / 1e3

    def _queues(self, stream: Stream) -> list[torch.cuda.Stream]:
        if stream is not Stream.COMPUTE:
            return [self._sides[stream]]
        current = torch.cuda.current_stream(self.device)
        self._computes.setdefault(current.cuda_stream, current)
        if len(self._computes) == 1:
            return [current]
        return [current, *(other for other in list(self._computes.values()) if other != current)]

    def _forget_error(self) -> None:
        """Clear the runtime's last error, which torch's next kernel launch would otherwise report as its own."""
        with contextlib.suppress(RuntimeError), Quietly():
            torch.empty(1, device=self.device).fill_(0)


def _bytes_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    storage = storage_over(address, size_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
