"""Ops on other streams than the session's. See [Note: the home stream] in device/streams.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.kinds import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.device.streams import Streams
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["OtherStreams"]


class OtherStreams:
    """Runs ops, and makes the buffers of those on another stream than the home stream stay on the device."""

    def __init__(self, streams: Streams, ledger: Ledger, transfers: Transfers) -> None:
        self._streams = streams
        self._ledger = ledger
        self._transfers = transfers
        self.plain_types: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})

    def run(
        self, run: Callable[..., Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run an op through `run(func, types, args, kwargs)`."""
        streams = self._streams
        if streams.current_id() == streams.home_id:
            return run(func, types, args, kwargs)
        if self._ledger.num_handles == 0 and graph_task_id() == -1:
            # Rule 3 of the note: the stream on which a step begins is the home stream.
            streams.move_home()
            self._ledger.cut()
            self._transfers.forget()
            return run(func, types, args, kwargs)
        was_on_other_stream, streams.is_on_other_stream = streams.is_on_other_stream, True
        try:
            self._make_stay((*args, *kwargs.values()) if kwargs else args)
            out = run(func, types, args, kwargs)
            self._make_stay((out,))
            return out
        finally:
            streams.is_on_other_stream = was_on_other_stream

    def _make_stay(self, values: Any) -> None:
        """Make the buffers stay that an op on another stream reads or makes: rule 1 of the note."""
        for tensor in tensors_in(values):
            if tensor.layout is not torch.strided or tensor.__class__ not in self.plain_types:
                continue
            if graph_task_id() == -1:
                buffer = self._ledger.buffer_of(tensor)
            else:  # making the storage object would stop the engine from accumulating in place
                record = self._ledger.find(tensor)
                buffer = record.current if record is not None else None
                if buffer is None:
                    continue
            self._ledger.stay(buffer, Stays.OTHER_STREAM)
            self._transfers.stop_leaving(buffer)
            if buffer.num_saved:
                self._ledger.hold_again(buffer)
