"""Residency on an accelerator: what is done with buffers is done on the home stream, by one thread at a time.

See [Note: the home stream] in streams.py and [Note: threads of the engine] in device_recorder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torchdelta.runtime.residency import Residency

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.buffer import Buffer
    from torchdelta.runtime.device_recorder import DeviceRecorder

# What CUDA's caching allocator may round up: a small block to 512 bytes (for a few outputs), a large one by what is
# left of the block that it lies in.
_ROUNDING_BYTES: Final = 4 * 512
_LARGE_BYTES: Final = 1 << 20
_NEAR: Final = 0.85  # from this share of the budget on the allocator is asked before every op

__all__ = ["DeviceResidency"]


class DeviceResidency(Residency):
    """Keeps an accelerator's memory under the budget."""

    recorder: DeviceRecorder  # set by the session, which makes the recorder after this

    def room(self, size_bytes: int, why: str) -> None:
        """Make sure that `size_bytes` more fit under the budget, rounded up as the allocator does."""
        if self.budget_bytes is not None:
            size_bytes += _ROUNDING_BYTES if size_bytes <= _LARGE_BYTES else _LARGE_BYTES
            if self.ledger.total_bytes + size_bytes > self.budget_bytes * _NEAR:
                self.ledger.ask_counter(fresh=True)  # the last answer may be old; see [Note: active bytes]
        super().room(size_bytes, why)

    def _make_room(self, total_bytes: int) -> None:
        recorder = self.recorder
        with recorder.lock, recorder.streams.at_home():
            recorder.clock.poll(wait=True)
            super()._make_room(total_bytes)

    def bring(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return a storage with this buffer's content, swapping it in or recomputing it when it is away."""
        storage = self.resident(buffer)
        if storage is not None:
            buffer.last_used = self.ledger.clock
            return storage
        with self.recorder.streams.at_home():
            return super().bring(buffer)

    def prefetch(self, save_order: int) -> None:
        """Start bringing back what backward wants next."""
        with self.recorder.streams.at_home():
            super().prefetch(save_order)

    def evict(self, buffer: Buffer, action: Any, *, lazily: bool = False) -> None:
        """Send a buffer away."""
        with self.recorder.streams.at_home():
            super().evict(buffer, action, lazily=lazily)
