"""Streams: the work of a session on an accelerator is ordered by one stream.

[Note: the home stream]
What the runtime does to a buffer (copy it out, free it, replay its op) is correct if it is queued after the ops that
made and read the buffer. So a session has a *home stream*, the one that the step runs on, and three rules:

1. Only buffers that were made and read on the home stream are evicted. An op on another stream is run and counted, but
   not recorded; its inputs and outputs are kept from then on. In plain torch a saved tensor stays alive until backward,
   so a program may read it on a second stream without telling the allocator. If it were freed earlier, the home stream
   could overwrite it while the other stream still reads it.
2. All work on a buffer is queued on the home stream, even if an op or an unpack on another stream needs it; that other
   stream then waits for the home stream. The autograd engine runs a node on the stream of its forward, so a program
   with one stream never switches.
3. The home stream is the one on which the step begins: while nothing is saved, the stream of the next op becomes the
   home stream, and what was recorded on another stream before is forgotten.

So memory is allocated on the stream that uses it and returns to the allocator's pool of that stream: the stream orders
its reuse, and no `record_stream` is needed. Memory that the program freed while a side stream still uses it (by its own
`record_stream`) is never evicted; it counts, since the allocator's active bytes count it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.device import current_stream, stream_id_reader

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Streams"]


class Streams:
    """The home stream of a session on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current_id = stream_id_reader(device)
        self.home_id = self.current_id()
        self._home = current_stream(device)
        self.is_on_other_stream = False  # the op that runs was queued on another stream

    def move_home(self) -> None:
        """Make the current stream the home stream."""
        self.home_id = self.current_id()
        self._home = current_stream(self.device)

    @contextlib.contextmanager
    def at_home(self) -> Generator[None]:
        """Queue the work inside the context on the home stream; the outer stream then waits for it."""
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
