"""The seam between the runtime and the places a buffer can go to: a *tier* holds bytes that left the device.

A tier hands out slots, copies whole storages into and out of them in the background, and keeps count. The runtime
decides who leaves and when; it never learns whether a slot is host memory, a piece of a file or a pinned arena.

Three rules hold for every tier, and callers rely on them:

- Order. Transfers of one slot happen in the order in which they were started: a read sees the write before it, also
  when that write is still under way. Reads overtake writes of other slots, because a read is what a step waits for.
- Memory. A tier allocates and frees no tensor memory: the caller brings every storage and drops it, on its own
  thread. A storage belongs to its transfer until `is_done()` has said so or `wait()` has returned. On a device with
  streams, storages are allocated, and calls are made, on the compute stream that uses them: see pinned.py.
- Failure. What went wrong in the background is raised by `wait()`, never swallowed. After a failed write the source
  is untouched, so the caller can keep the buffer; reads of that slot fail as well. After a failed read the content of
  the target is undefined.

Reserving, writing, reading and releasing may happen on any thread of the process that opened the tier; `release()`
may also be called from a finalizer. A forked child owns none of it: there releasing and closing do nothing and
everything else raises `TierError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Slot", "Tier", "Transfer"]


class Slot:
    """A place in one tier, good for one buffer's bytes until it is released.

    Opaque to callers but for its size; each tier extends it with where the bytes are.
    """

    __slots__ = ("__weakref__", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


@runtime_checkable
class Transfer(Protocol):
    """One copy in flight between a storage and a slot."""

    @property
    def size_bytes(self) -> int:
        """Bytes that this transfer moves."""
        ...

    def is_done(self) -> bool:
        """Tell, without blocking, whether the copy has ended, well or badly."""
        ...

    def wait(self) -> float:
        """Wait for the copy: whatever the calling thread does or computes next comes after it.

        Blocks until the copy has ended, or, on a device with streams, lets its compute stream wait and returns at once.
        May be repeated, and then returns 0.0 or raises the same error.

        Returns:
            Seconds that this call blocked: the stall. 0.0 when the copy had ended before.

        Raises:
            TierIOError: The copy failed. Keep the buffer, or take the other action.
        """
        ...


@runtime_checkable
class Tier(Protocol):
    """A place outside the device where buffers can stay: memory, disk, pinned host memory."""

    @property
    def name(self) -> str:
        """The name that it is registered under."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of all reserved slots, each rounded up to the tier's block size; never above `capacity_bytes`."""
        ...

    @property
    def peak_used_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        ...

    @property
    def capacity_bytes(self) -> int | None:
        """The budget of this tier, or None where only the hardware sets a limit."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Host memory that the tier itself holds for bounce buffers; constant while it is open."""
        ...

    @property
    def write_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth into the tier."""
        ...

    @property
    def read_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth out of the tier."""
        ...

    def reserve(self, size_bytes: int) -> Slot:
        """Take room for one buffer.

        Raises:
            TierFullError: The tier's budget or the hardware has no such room; names capacity, used and asked bytes.
        """
        ...

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> Transfer:
        """Start copying `storage` (of exactly the slot's size) into `slot`.

        The caller must not change or free the storage until the transfer is done.
        """
        ...

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> Transfer:
        """Start filling `storage` (of exactly the slot's size) from `slot`, after any write that is still under way."""
        ...

    def release(self, slot: Slot) -> None:
        """Give the slot back; its bytes are reused once its transfers in flight have ended. Repeats are ignored."""
        ...

    def drain(self) -> None:
        """Wait for every transfer under way, and let go of its storage; failures are not raised here."""
        ...

    def take_stall_s(self) -> float:
        """Return the seconds of stall that no `wait()` has returned and that became known since the last call.

        A device with streams stands still while the host runs on; how long is known only afterwards.
        """
        ...

    def close(self) -> None:
        """Stop the transfers, join the threads and drop everything held. Repeats are ignored."""
        ...
