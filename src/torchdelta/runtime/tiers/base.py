"""The interface between the runtime and the tiers: a *tier* holds the bytes of evicted buffers.

A tier hands out slots, copies whole storages into and out of them in the background, and counts the bytes. The runtime
decides which buffer is evicted and when. It does not know whether a slot is host memory, part of a file or pinned.

Callers rely on three rules, which every tier keeps:

- Order. Transfers of one slot happen in the order in which they were started. A read returns what the write before it
  wrote, even if that write is still under way. Reads overtake writes of other slots, because a step waits for reads;
  a transfer that a caller waits for overtakes both.
- Memory. A tier neither allocates nor frees tensor memory: the caller allocates every storage and drops it, on its own
  thread. A storage belongs to its transfer until `is_done()` returns True or `wait()` returns. On a device with
  streams, storages are allocated, and calls are made, on the compute stream that uses them: see pinned.py.
- Failure. `wait()` raises every error of a background copy. After a failed write the source is unchanged, so the caller
  can keep the buffer; reads of that slot fail as well. After a failed read the content of the target is undefined.

Any thread of the process that opened the tier may reserve, write, read and release; finalizers may call `release()` as
well. In a forked child releasing and closing do nothing, and every other call raises `TierError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Slot", "Tier", "Transfer"]


class Slot:
    """A place for one buffer's bytes in one tier, until it is released.

    Callers use its size only; each tier adds where the bytes are.
    """

    __slots__ = ("__weakref__", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


@runtime_checkable
class Transfer(Protocol):
    """One copy in flight between a storage and a slot."""

    @property
    def size_bytes(self) -> int:
        """Bytes that this transfer copies."""
        ...

    def is_done(self) -> bool:
        """Return, without blocking, whether the copy has succeeded or failed."""
        ...

    def wait(self) -> float:
        """Wait for the copy: all that the calling thread does or computes next happens after it.

        Block until the copy has ended; on a device with streams, let the compute stream wait and return at once.
        Repeated calls return 0.0 or raise the same error.

        Returns:
            The stall: seconds that this call blocked. 0.0 if the copy had ended before.

        Raises:
            TierIOError: The copy failed. The caller keeps the buffer, or recomputes it.
        """
        ...


@runtime_checkable
class Tier(Protocol):
    """A place outside the device that holds evicted buffers: memory, disk, pinned host memory."""

    @property
    def name(self) -> str:
        """The registered name."""
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
        """The budget of this tier, or None if only the hardware limits it."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Host memory that the tier holds for staging buffers; constant while it is open."""
        ...

    @property
    def write_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth into the tier."""
        ...

    @property
    def read_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth out of the tier."""
        ...

    @property
    def write_cpu_s_per_byte(self) -> float:
        """Running estimate of the processor time that a byte written takes."""
        ...

    @property
    def read_cpu_s_per_byte(self) -> float:
        """Running estimate of the processor time that a byte read takes."""
        ...

    def reserve(self, size_bytes: int) -> Slot:
        """Reserve a slot for one buffer.

        Raises:
            TierFullError: The budget or the hardware has no such room; names capacity, used and requested bytes.
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

    def map_into(self, slot: Slot, storage: torch.UntypedStorage, keeper: object) -> bool:
        """Let an empty storage have the bytes of `slot` as its memory: a page is read when it is touched.

        Only for tiers in files, and storages on the CPU. That memory outlives `close()`.

        Args:
            slot: A slot that was written. It must not be released as long as that memory lives.
            storage: It has no bytes now, and those of the slot afterwards. What is written to it is not written there.
            keeper: An object that lives as long as that memory: the one that would release the slot.

        Returns:
            Whether that was possible; otherwise nothing has changed.

        Raises:
            TierError: The slot was released or never written, or the tier is closed.
            TierIOError: The slot cannot be read.
        """
        ...

    def release(self, slot: Slot) -> None:
        """Free the slot; its bytes are reused once its transfers have ended. Repeated calls do nothing."""

    def drain(self) -> None:
        """Wait for every transfer under way and drop its reference to its storage; failures are not raised here."""

    def take_stall_s(self) -> float:
        """Return the seconds of stall that `wait()` has not returned and that became known since the last call.

        On a device with streams the compute stream waits while the host continues; the duration is known only later.
        """
        ...

    def close(self) -> None:
        """Stop the transfers, join the threads and free everything. Repeated calls do nothing."""
