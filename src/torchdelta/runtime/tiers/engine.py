"""The seam between the tiers and a device that computes and copies by itself, in streams.

A stream is a queue that the device works off in order; an event is a mark in one that others can wait for. Nothing
here blocks the host but `finish`. CUDA is behind it in `cuda.py`; the tests put a simulated device there, which copies
when it likes and notices every access that nothing ordered.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "Event", "Stream"]

# What `Engine.mark` returns: opaque to all but its engine.
Event = Any


class Stream(enum.Enum):
    """The queues of a device that a tier knows."""

    COMPUTE = "compute"  # the one that the calling thread computes on just now
    OUT = "out"  # copies from the device to the host
    IN = "in"  # copies from the host to the device


class Engine(Protocol):
    """A device, as a tier needs it. All of it may be called on any thread; failures are RuntimeErrors."""

    device: torch.device

    def pin(self, address: int, size_bytes: int) -> None:
        """Lock host memory into place so that the device copies from and to it without help.

        Raises:
            OSError: It was refused; copies from and to this memory work all the same, slowly and with the host waiting.
        """
        ...

    def unpin(self, address: int) -> None:
        """Take `pin` back. No copy from or to that memory is under way any more."""
        ...

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event that is reached when all that stands in the stream now is done."""
        ...

    def follow(self, stream: Stream, event: Event) -> None:
        """Let whatever comes into the stream from now on start after the event."""
        ...

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy; the addresses of `Stream.OUT` are on the host and the device, those of `Stream.IN` reversed.

        Both memories stay in place until the copy is done; that is the caller's business.
        """
        ...

    def is_reached(self, event: Event) -> bool:
        """Tell, without blocking, whether an event has been reached."""
        ...

    def finish(self, event: Event) -> None:
        """Block the host until an event has been reached."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Return the seconds of the device between two timed events, both reached."""
        ...
