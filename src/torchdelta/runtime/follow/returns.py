"""Brings saved tensors back before they are needed, as a program says: copies in and replays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchdelta._torch.modes import Quietly
from torchdelta.errors import ReplayError, SavedTensorError, TierError
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.runtime.memory.room import NoRoomError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.state.buffer import Buffer

__all__ = ["Returns"]

_logger = logging.getLogger("torchdelta")


class Returns:
    """Starts what brings buffers back. What is not possible now is done when the buffer is unpacked.

    Args:
        restorer: Brings buffers back; knows the ledger, the room and the transfers.
    """

    def __init__(self, restorer: Restorer) -> None:
        self._restorer = restorer
        self._room = restorer.room

    def fetch(self, buffer: Buffer | None) -> None:
        """Start the copy in of a buffer, if it is away and there is room."""
        if buffer is None or not buffer.num_saved or buffer.copy is None:
            return
        if buffer.strong is not None or buffer.fetching is not None or resident(buffer) is not None:
            return
        self._room.usage.ask_counter()
        if not self._room.has(buffer.size_bytes):
            return  # `bring` makes room when it is unpacked
        restorer = self._restorer
        with restorer.device.exclusive():
            try:
                with Quietly():
                    storage = restorer.new_storage(buffer.size_bytes)
                restorer.transfers.start_fetch(buffer, buffer.copy, storage)
            except (RuntimeError, TierError) as error:
                if not isinstance(error, TierError) and not is_out_of_memory(error):
                    raise

    def replay(self, found: Sequence[Buffer | None]) -> None:
        """Replay a group of buffers, so far as they were dropped and there is room."""
        missing = [
            buffer
            for buffer in found
            if buffer is not None
            and buffer.num_saved
            and buffer.op is not None
            and buffer.copy is None
            and buffer.fetching is None
            and resident(buffer) is None
        ]
        if not missing or self._restorer.ledger.surveys:
            return
        room = self._room
        room.is_optional = True
        try:
            with self._restorer.device.exclusive(), Quietly():
                self._restorer.replayer.recompute_group(missing)
        except (NoRoomError, ReplayError, SavedTensorError, TierError) as error:
            # `bring` makes each of them again, and raises, when it is unpacked; not all of them may be.
            _logger.debug("a replay ahead of its use failed: %r", error)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            room.is_optional = False
