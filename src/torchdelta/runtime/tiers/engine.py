"""The interface between the tiers and a device that computes and copies asynchronously, in streams.

A stream is a queue that the device processes in order; an event is a mark in a stream that other streams can wait for.
Only `finish` blocks the host. `cuda.py` implements it for CUDA. The tests implement it by a simulated device, which
copies at random moments and detects every unordered access.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "Event", "Stream"]

# What `Engine.mark` returns: only its engine knows the type.
Event = Any


class Stream(enum.Enum):
    """The streams of a device that a tier uses."""

    COMPUTE = "compute"  # the current stream of the calling thread
    OUT = "out"  # copies from the device to the host
    IN = "in"  # copies from the host to the device


class Engine(Protocol):
    """A device, for a tier. Any thread may call it; failures are RuntimeErrors."""

    device: torch.device

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin (page-lock) host memory so that the device copies from and to it asynchronously.

        Raises:
            OSError: The memory is not pinned. Copies from and to it still work, but are slow and block the host.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy from or to that memory may be under way."""

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event that is reached when all work that is queued in the stream now is done."""
        ...

    def follow(self, stream: Stream, event: Event) -> None:
        """Make all work that is queued in the stream from now on wait for the event."""

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy: in `Stream.OUT` to the host from the device, in `Stream.IN` to the device from the host.

        The caller keeps both memories allocated until the copy is done.
        """

    def is_reached(self, event: Event) -> bool:
        """Return, without blocking, whether an event has been reached."""
        ...

    def finish(self, event: Event) -> None:
        """Block the host until an event has been reached."""

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Return the seconds between two timed events, both reached, as the device measured them."""
        ...
