"""The recorder where persistent tensors may leave: it brings the arguments of every op back before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.list_functions import is_list_op
from torchdelta._torch.modes import num_modes
from torchdelta.runtime.record.mode_sensitive import makes_mode_sensitive_node
from torchdelta.runtime.record.pieces import call_in_pieces
from torchdelta.runtime.record.recorder import Recorder

if TYPE_CHECKING:
    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.record.other_streams import OtherStreams
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.record.subclasses import Subclasses

__all__ = ["BringingRecorder", "recorder_for"]

# Reads neither the content of its argument nor the size of its storage.
_DETACH: Final = torch.ops.aten.detach.default


class BringingRecorder(Recorder):
    """A recorder whose ops find their arguments here, and keep them here while they run."""

    persistents: Persistents

    def _see(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if func is _DETACH:
            return super()._see(func, types, args, kwargs)
        if args and args[0].__class__ is list and not types and not num_modes() and is_list_op(func):

            def see(*args: Any, **kwargs: Any) -> Any:
                return self._see_one(func, types, args, kwargs)

            return call_in_pieces(see, args, kwargs, self.persistents.piece_bytes, writes_first=True)
        return self._see_one(func, types, args, kwargs)

    def _see_one(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self.persistents.begin(args, kwargs)
        try:
            if makes_mode_sensitive_node(func.__name__) and torch.is_grad_enabled():
                self.persistents.keep(args, kwargs)
            return super()._see(func, types, args, kwargs)
        finally:
            self.persistents.end()


def recorder_for(
    restorer: Restorer, saved: SavedTensors, subclasses: Subclasses, other_streams: OtherStreams | None
) -> Recorder:
    """Return the recorder of a session."""
    kind = Recorder if restorer.room.persistents is None else BringingRecorder
    return kind(restorer, saved, subclasses, other_streams)
