"""Saved tensors on an accelerator: unpacked by one thread of the engine at a time, and left alone in captured graphs.

See [Note: threads of the engine] and [Note: captured graphs] in device_recorder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdelta.runtime.device_recorder import DeviceRecorder
from torchdelta.runtime.saved import Handle, Pinned, SavedTensors

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceSavedTensors"]


class DeviceSavedTensors(SavedTensors):
    """The pack and unpack hooks of a session on an accelerator."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves."""
        return Pinned(tensor) if self.session.recorder.is_off() else super().pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Give back a saved tensor, bringing its content back when it is away."""
        recorder = self.session.recorder
        if packed.__class__ is not Handle or not isinstance(recorder, DeviceRecorder):
            return super().unpack(packed)
        with recorder.lock:
            return super().unpack(packed)
