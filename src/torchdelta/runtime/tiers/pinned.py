"""The memory tier of a device: swapped bytes go to an arena of pinned host memory, on streams of their own.

No thread and no blocking: a transfer is a copy in the stream `OUT` or `IN`, ordered by events, and the host goes on.

[Note: stream order]
Five rules make every byte arrive before it is used and stay until it is read. The first two are kept when a transfer is
started, on the thread that brings the storage:

1. A copy follows all that the compute stream had queued when the copy was started. Going out, that is the work which
   made the content. Coming in, it is the work that still uses the target's memory from before it was freed and
   allocated again: an allocator hands memory on as soon as the host lets go of it, in the order of the compute stream.
2. A copy in follows the copy out before it of the same slot, and a copy out follows the last copy in of its slot.
   Copies of one direction follow each other anyway: each has one stream.
3. `wait()` lets the compute stream, and not the host, wait for the event of the copy. After a copy in, whatever is
   computed next finds the content. After a copy out, the source may be dropped at once: its memory goes to later work
   of the compute stream, which now comes after the copy; or to the target of a copy in, which by rule 1 comes after
   that. The allocator counts the bytes as free from then on, and rightly: nothing else can be put into them before
   they have been copied. So the budget of active bytes holds, and the host runs on instead of leaving the device idle.
   (`Tensor.record_stream` would keep the block counted until the allocator happens to ask again.)
4. Until `wait()` was called or the event was reached, the tier itself holds the storage, whatever the caller does.
5. The room of a released slot is handed on at once. Its next content comes in by stream `OUT`, after the slot's own
   copy out; and `OUT` is made to follow the slot's last copy in.

Every wait is for an event that was recorded before it, so there is no circle, and no deadlock.

[Note: stall of a device]
`wait()` returns the seconds that the host was blocked: always 0.0 here. How long the compute stream stood still is told
by two timed events around its wait, where the copy was not over anyway; they are read when they have been reached, and
`take_stall_s` hands the sum out.

[Note: failures of a device]
What is refused when a copy is queued is that transfer's own failure, told by its `wait()`. A copy that fails later
takes the whole device context with it: CUDA reports it from every call that follows, these included.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.tiers.arena import Arena, PinnedMemory
from torchdelta.runtime.tiers.bandwidth import LinkEstimate
from torchdelta.runtime.tiers.base import Slot
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.pool import Pool

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.engine import Engine, Event
    from torchdelta.runtime.tiers.slots import Extent

__all__ = ["PinnedSlot", "PinnedTier", "StreamTransfer"]

_BLOCK_BYTES: Final = 512  # what a device copies well from and to, and what CUDA's allocator rounds to
_LEAST_PIECE_BYTES: Final = 1 << 20  # a smaller piece takes longer to start than to copy
# A constant, not a probe: what PCIe 3 moves with 16 lanes. The first few transfers correct it.
_START_BYTES_PER_S: Final = 12e9


class PinnedSlot(Slot):
    """A slot in the arena, and the events that order its copies."""

    __slots__ = ("extents", "failure", "is_released", "is_written", "last_read", "last_write", "owner")

    def __init__(self, size_bytes: int, extents: tuple[Extent, ...], owner: PinnedTier) -> None:
        super().__init__(size_bytes)
        self.extents = extents
        self.owner = owner
        self.failure: BaseException | None = None  # of the last write: reads must not return what it left
        self.last_write: Event | None = None
        self.last_read: Event | None = None
        self.is_written = False
        self.is_released = False


class StreamTransfer:
    """One copy in a stream; keeps the storage alive until the copy is over or the compute stream comes after it."""

    __slots__ = ("_storage", "error", "event", "is_over", "is_read", "key", "size_bytes", "tier")

    def __init__(self, tier: PinnedTier, key: int, storage: torch.UntypedStorage, *, is_read: bool) -> None:
        self.tier = tier
        self.key = key
        self.size_bytes = storage.nbytes()
        self.is_read = is_read
        self.event: Event | None = None  # its end; None: nothing was queued
        self.error: BaseException | None = None
        self.is_over = False
        self._storage: torch.UntypedStorage | None = storage

    def is_done(self) -> bool:
        """Tell, without blocking, whether the copy is over, well or badly."""
        if self.is_over:
            return True
        try:
            if self.event is not None and not self.tier.engine.is_reached(self.event):
                return False
        except RuntimeError as error:
            self.error = self.error or error
        self.drop_storage()
        return True

    def wait(self) -> float:
        """Let the compute stream wait for the copy; the host does not. See [Note: stream order] 3."""
        if not self.is_done():
            self.tier.check_process()
            try:
                self.tier.hold_compute(self.event)
            except RuntimeError as error:
                self.error = self.error or error
        self.drop_storage()
        if self.error is not None:
            verb = "read" if self.is_read else "write"
            reason = str(self.error).splitlines()[0] if str(self.error) else type(self.error).__name__
            raise TierIOError(
                f"the {self.tier.name} tier could not {verb} a buffer of {self.size_bytes} bytes: {reason}"
            ) from self.error
        return 0.0

    def drop_storage(self) -> None:
        """Let go of the storage: the copy is over, or what comes next comes after it."""
        self.is_over = True
        self.tier.in_flight.pop(self.key, None)
        self._storage = None


class PinnedTier:
    """Pinned host memory as a tier for the storages of one device; see `base.Tier`.

    Args:
        engine: The device.
        capacity_bytes: The most that the arena may take (`host_budget`); what is over a whole page stays unused. None
            for no limit.
    """

    def __init__(self, engine: Engine, *, capacity_bytes: int | None) -> None:
        self.engine = engine
        self.in_flight: dict[int, StreamTransfer] = {}
        self._process_id = os.getpid()
        self._is_closed = False
        memory = PinnedMemory(engine)
        self._arena = Arena(memory)
        if capacity_bytes is not None:
            capacity_bytes -= capacity_bytes % mmap.PAGESIZE
        self._pool = Pool(
            name=self.name,
            budget_option="host_budget",
            grow=self._arena.grow,
            block_bytes=_BLOCK_BYTES,
            least_piece_bytes=_LEAST_PIECE_BYTES,
            is_walled=True,
            capacity_bytes=capacity_bytes,
            granule_bytes=mmap.PAGESIZE,
        )
        self._write_link = LinkEstimate(_START_BYTES_PER_S)
        self._read_link = LinkEstimate(_START_BYTES_PER_S)
        self._keys = itertools.count()
        # Over the pool, the slots and the order of what is queued. Reentrant, since a collection inside may close us.
        self._lock = threading.RLock()
        self._released: deque[PinnedSlot] = deque()  # given back by finalizers, which may neither block nor queue
        self._queued: dict[Stream, deque[StreamTransfer]] = {Stream.OUT: deque(), Stream.IN: deque()}
        self._measured: dict[LinkEstimate, deque[tuple[Event, Event, int]]] = {
            self._write_link: deque(),
            self._read_link: deque(),
        }
        self._held: deque[tuple[Event, Event]] = deque()
        self._stall_s = 0.0
        self._finalizer = weakref.finalize(self, _shut_down, engine, memory, self._process_id)

    @property
    def name(self) -> str:
        """The name that the tier is registered under."""
        return "memory"

    @property
    def used_bytes(self) -> int:
        """Bytes of all reserved slots, each rounded up to the block."""
        if self._is_foreign():
            return 0
        with self._lock:
            self._collect_released()
            return self._pool.used_bytes

    @property
    def peak_used_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self._pool.peak_used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """The budget, or None."""
        return self._pool.capacity_bytes

    @property
    def staging_bytes(self) -> int:
        """Nothing is staged: the device copies straight from and to the slots."""
        return 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arena so far; within the capacity."""
        return self._pool.size_bytes

    @property
    def write_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth from the device."""
        return self._write_link.bytes_per_s

    @property
    def read_bytes_per_s(self) -> float:
        """Running estimate of the bandwidth to the device."""
        return self._read_link.bytes_per_s

    def reserve(self, size_bytes: int) -> PinnedSlot:
        """Take room for one buffer."""
        self._check_usable()
        if size_bytes < 0:
            raise TierError(f"a slot cannot have {size_bytes} bytes")
        with self._lock:
            self._collect_released()
            extents, reason = self._pool.take(size_bytes)
        self._sweep()
        if extents is None:
            raise self._pool.full_error(size_bytes, reason)
        return PinnedSlot(size_bytes, extents, self)

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> StreamTransfer:
        """Queue a copy of `storage` into `slot`."""
        return self._start(self._checked(slot, storage), storage, is_read=False)

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> StreamTransfer:
        """Queue a copy of `slot` into `storage`, which was allocated on the compute stream of this thread."""
        pinned = self._checked(slot, storage)
        if not pinned.is_written:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is read but was never written")
        return self._start(pinned, storage, is_read=True)

    def release(self, slot: Slot) -> None:
        """Give the slot back. Safe in finalizers: takes no lock and queues nothing."""
        if not isinstance(slot, PinnedSlot) or slot.owner is not self:
            raise TierError(f"a slot that is no slot of this {self.name} tier was given back to it")
        if slot.is_released or self._is_closed or self._is_foreign():
            return
        slot.is_released = True
        self._released.append(slot)

    def drain(self) -> None:
        """Let the compute stream come after every transfer under way, and let go of their storages."""
        for transfer in list(self.in_flight.values()):
            with contextlib.suppress(TierError):
                transfer.wait()

    def close(self) -> None:
        """Wait on the host for what is under way, and give the arena back."""
        if self._is_foreign():
            return
        with self._lock:
            self._is_closed = True
            self._finalizer()
            self._released.clear()
            self._pool.clear()
        for transfer in list(self.in_flight.values()):
            transfer.drop_storage()

    def take_stall_s(self) -> float:
        """Return the seconds of stall that have become known since the last call. See [Note: stall of a device]."""
        if self._is_foreign():
            return 0.0
        self._sweep()
        with self._lock:
            stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def hold_compute(self, event: Event) -> None:
        """Let the compute stream of this thread wait for an event, and measure how long it does."""
        engine = self.engine
        start = engine.mark(Stream.COMPUTE, is_timed=True)
        engine.follow(Stream.COMPUTE, event)
        self._held.append((start, engine.mark(Stream.COMPUTE, is_timed=True)))

    def check_process(self) -> None:
        """Refuse to work in a forked child, for which the device does not exist."""
        if self._is_foreign():
            raise TierError(f"the {self.name} tier belongs to process {self._process_id}: a forked child cannot use it")

    def _start(self, slot: PinnedSlot, storage: torch.UntypedStorage, *, is_read: bool) -> StreamTransfer:
        self._sweep()
        stream = Stream.IN if is_read else Stream.OUT
        with self._lock:
            self._check_usable()
            transfer = StreamTransfer(self, next(self._keys), storage, is_read=is_read)
            if is_read and slot.failure is not None:
                transfer.error = slot.failure
            elif slot.size_bytes:
                self._queue(slot, storage.data_ptr(), transfer, stream)
            if not is_read:
                slot.failure = transfer.error
                slot.is_written = True
            if transfer.event is None:
                transfer.drop_storage()
                return transfer
            self.in_flight[transfer.key] = transfer
            self._queued[stream].append(transfer)
        return transfer

    def _queue(self, slot: PinnedSlot, address: int, transfer: StreamTransfer, stream: Stream) -> None:
        """Put a copy into its stream, behind all that it has to follow: [Note: stream order] 1 and 2."""
        engine = self.engine
        is_read = transfer.is_read
        start: Event = None
        try:
            engine.follow(stream, engine.mark(Stream.COMPUTE))
            before = slot.last_write if is_read else slot.last_read
            if before is not None:
                engine.follow(stream, before)
            start = engine.mark(stream, is_timed=True)
            left_bytes = slot.size_bytes
            for extent in slot.extents:
                piece_bytes = min(extent.size_bytes, left_bytes)
                host = self._arena.address_of(extent.offset_bytes)
                to_address, from_address = (address, host) if is_read else (host, address)
                engine.copy(stream, to_address=to_address, from_address=from_address, size_bytes=piece_bytes)
                address += piece_bytes
                left_bytes -= piece_bytes
        except RuntimeError as error:
            transfer.error = error.with_traceback(None)
        except BaseException:  # an interrupt: what was queued is over before anybody can free its memory
            engine.finish(engine.mark(stream))
            raise
        with contextlib.suppress(RuntimeError):  # of a copy refused in the middle, the pieces before it are under way
            transfer.event = engine.mark(stream, is_timed=True)
            if is_read:
                slot.last_read = transfer.event
            else:
                slot.last_write = transfer.event
            if transfer.error is None:
                link = self._read_link if is_read else self._write_link
                self._measured[link].append((start, transfer.event, slot.size_bytes))

    def _sweep(self) -> None:
        """Let go of the storages of copies that are over, and read the clocks of what has been reached."""
        with self._lock, contextlib.suppress(RuntimeError):
            for queue in self._queued.values():
                while queue and queue[0].is_done():
                    queue.popleft()
            for link, measured in self._measured.items():
                while measured and self.engine.is_reached(measured[0][1]):
                    start, end, size_bytes = measured.popleft()
                    link.start(0.0)
                    link.end(self.engine.elapsed_s(start, end), size_bytes)
            while self._held and self.engine.is_reached(self._held[0][1]):
                self._stall_s += self.engine.elapsed_s(*self._held.popleft())

    def _collect_released(self) -> None:
        """Hand on the room of released slots: [Note: stream order] 5. Needs the lock."""
        while self._released:
            slot = self._released.popleft()
            if slot.last_read is not None:
                try:
                    if not self.engine.is_reached(slot.last_read):
                        self.engine.follow(Stream.OUT, slot.last_read)
                except RuntimeError as error:
                    raise TierIOError(f"the {self.name} tier's device has failed: {error}") from error
            self._pool.give_back(slot.extents)

    def _is_foreign(self) -> bool:
        return os.getpid() != self._process_id

    def _check_usable(self) -> None:
        self.check_process()
        if self._is_closed:
            raise TierError(f"the {self.name} tier is closed")

    def _checked(self, slot: Slot, storage: torch.UntypedStorage) -> PinnedSlot:
        self._check_usable()
        if not isinstance(slot, PinnedSlot) or slot.owner is not self:
            raise TierError(f"this slot of {slot.size_bytes} bytes is no slot of this {self.name} tier")
        if slot.is_released:
            raise TierError(f"a slot of {slot.size_bytes} bytes in the {self.name} tier is used after its release")
        if storage.device != self.engine.device:
            raise TierError(
                f"the {self.name} tier copies storages on {self.engine.device} only, not one on {storage.device}"
            )
        if storage.nbytes() != slot.size_bytes:
            raise TierError(f"a storage of {storage.nbytes()} bytes meets a slot of {slot.size_bytes} bytes")
        return slot


def _shut_down(engine: Engine, memory: PinnedMemory, process_id: int) -> None:
    """Wait until no copy runs, and unpin. A forked child keeps its hands off."""
    if os.getpid() != process_id:
        return
    with contextlib.suppress(RuntimeError):  # of a device that has failed there is nothing to wait for
        for stream in (Stream.OUT, Stream.IN):
            engine.finish(engine.mark(stream))
    memory.close()
