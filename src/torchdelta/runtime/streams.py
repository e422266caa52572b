"""Streams: work on an accelerator happens in the order of its queue, and a session knows one queue.

[Note: the home stream]
What the runtime does to a buffer (copy it out, free it, run its op again) is right if it is queued behind the ops that
made and read the buffer. So a session has a *home stream*, the one that the step runs on, and three rules:

1. Only what was made and read on the home stream ever leaves. An op on another stream is run, counted and not recorded;
   what it reads and makes is kept from then on. In plain torch a saved tensor stays alive until backward, so a program
   may read it on a second stream without telling the allocator; freeing it earlier would let the home stream write over
   it while the other still reads.
2. Whatever is done with a buffer is done on the home stream, also when an op or an unpack on another stream asks for
   it; the asking stream then waits for the home stream. The autograd engine runs a node on the stream of its forward,
   so in a program with one stream nothing is ever switched.
3. Home is where the step begins: while nothing is saved, the stream of the next op becomes home, and what was recorded
   before on another is forgotten.

So memory is allocated on the stream that uses it, and goes back to the allocator's pool of that stream: reuse is
ordered by the queue itself, and no `record_stream` is wanted. Memory that the program freed while a side stream still
uses it (its own `record_stream`) is not ours to evict; it counts, since the allocator's active bytes count it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torchdelta._torch_device import current_stream, stream_id_reader

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Streams"]


class Streams:
    """Knows the home stream of a session on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current_id = stream_id_reader(device)
        self.home_id = self.current_id()
        self._home = current_stream(device)

    def move_home(self) -> None:
        """Make the current stream the home stream."""
        self.home_id = self.current_id()
        self._home = current_stream(self.device)

    @contextlib.contextmanager
    def at_home(self) -> Generator[None]:
        """Queue what is done inside on the home stream; the stream from outside waits for it."""
        if self.current_id() == self.home_id:
            yield
            return
        outside = current_stream(self.device)
        index = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(self._home)  # makes its device current as well
        try:
            yield
        finally:
            torch.accelerator.set_stream(outside)
            torch.accelerator.set_device_index(index)
            outside.wait_stream(self._home)
