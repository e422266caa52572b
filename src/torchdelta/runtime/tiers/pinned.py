"""The memory tier of a device: evicted bytes go to an arena of pinned host memory, on two separate streams.

No thread copies and no call blocks: a transfer is a copy in the stream `OUT` or `IN`, ordered by events.

[Note: stream order]
Five rules ensure that every byte arrives before it is used and is kept until it is read. Rules 1 and 2 are applied when
a transfer is started, on the calling thread:

1. A copy waits for all work that the compute stream had queued when the copy was started. For a copy out, that work
   computed the content. For a copy in, that work may still use the target's memory, from before it was freed and
   allocated again: an allocator reuses memory as soon as the host frees it, in the order of the compute stream.
2. A copy in waits for the previous copy out of the same slot, and a copy out waits for the last copy in of its slot.
   Copies of one direction are ordered already: each direction has one stream.
3. `wait()` makes the compute stream, not the host, wait for the event of the copy. After a copy in, later work finds
   the content. After a copy out, the source may be dropped at once: its memory goes to later work of the compute
   stream, which now runs after the copy, or to the target of a copy in, which by rule 1 runs after that work. The
   allocator counts the bytes as free from then on. That is correct: nothing is written to them before they are copied.
   So the budget of active bytes holds, and the host continues and keeps the device busy.
   (`Tensor.record_stream` would keep the block counted until the allocator polls its events again.)
4. Until `wait()` is called or the event is reached, the tier holds a reference to the storage.
5. The room of a released slot is reused at once. Its next content is written by stream `OUT`, after the slot's own copy
   out; and `OUT` is made to wait for the slot's last copy in.

Every wait is for an event that was recorded before it, so no cycle and no deadlock is possible.

[Note: stall of a device]
`wait()` returns the seconds that the host was blocked: always 0.0 here. If the copy is still running, two timed events
around the wait of the compute stream measure how long it waits. They are read once they are reached; `take_stall_s`
returns the sum.

[Note: failures of a device]
A copy that is refused when it is queued fails alone, and its `wait()` raises the error. A copy that fails later breaks
the whole device context: CUDA reports the error from every later call, including the calls made here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from torchdelta._torch.storages import memory_behind
from torchdelta.errors import TierIOError
from torchdelta.runtime.tiers.arena import Arena, PinnedMemory
from torchdelta.runtime.tiers.bandwidth import LinkEstimate
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.pool import Pool
from torchdelta.runtime.tiers.slotted import Owner, PlacedSlot, SlottedTier, copy_error

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.engine import Engine, Event
    from torchdelta.runtime.tiers.slots import Extent

__all__ = ["PinnedSlot", "PinnedTier", "StreamTransfer"]

_BLOCK_BYTES: Final = 512  # an efficient alignment for device copies; CUDA's allocator rounds to it as well
_LEAST_PIECE_BYTES: Final = 1 << 20  # a smaller piece takes longer to start than to copy
# A constant, not a probe: the bandwidth of PCIe 3 with 16 lanes. The first few transfers correct it.
_START_BYTES_PER_S: Final = 12e9


class PinnedSlot(PlacedSlot):
    """A slot in the arena, and the events that order its copies."""

    __slots__ = ("last_read", "last_write")

    def __init__(self, size_bytes: int, extents: tuple[Extent, ...], owner: Owner) -> None:
        super().__init__(size_bytes, extents, owner)
        self.last_write: Event | None = None
        self.last_read: Event | None = None


class StreamTransfer:
    """One copy in a stream; keeps the storage alive until the copy ends or the compute stream waits for it."""

    __slots__ = ("_storage", "error", "event", "is_over", "is_read", "key", "size_bytes", "tier")

    def __init__(self, tier: PinnedTier, key: int, storage: torch.UntypedStorage, *, is_read: bool) -> None:
        self.tier = tier
        self.key = key
        self.size_bytes = storage.nbytes()
        self.is_read = is_read
        self.event: Event | None = None  # the end of the copy; None if nothing was queued
        self.error: BaseException | None = None
        self.is_over = False
        self._storage: torch.UntypedStorage | None = storage

    def is_done(self) -> bool:
        """Return, without blocking, whether the copy has succeeded or failed."""
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
        """Make the compute stream, not the host, wait for the copy. See [Note: stream order] 3."""
        if not self.is_done():
            self.tier.owner.check_process()
            try:
                self.tier.hold_compute(self.event)
            except RuntimeError as error:
                self.error = self.error or error
        self.drop_storage()
        if self.error is not None:
            raise copy_error(self.tier.name, self.error, self.size_bytes, is_read=self.is_read) from self.error
        return 0.0

    def drop_storage(self) -> None:
        """Drop the reference to the storage: the copy is over, or all later work waits for it."""
        self.is_over = True
        self.tier.in_flight.pop(self.key, None)
        self._storage = None


class PinnedTier(SlottedTier[PinnedSlot, StreamTransfer]):
    """Pinned host memory as a tier for the storages of one device; see `base.Tier`.

    Args:
        engine: The device.
        capacity_bytes: The most that the arena may take (`host_budget`), rounded down to whole pages. None: no limit.
    """

    def __init__(self, engine: Engine, *, capacity_bytes: int | None) -> None:
        self.engine = engine
        self.in_flight: dict[int, StreamTransfer] = {}
        memory = PinnedMemory(engine)
        self._arena = Arena(memory.take)
        if capacity_bytes is not None:
            capacity_bytes -= capacity_bytes % mmap.PAGESIZE
        owner = Owner("memory")
        links = LinkEstimate(_START_BYTES_PER_S), LinkEstimate(_START_BYTES_PER_S)
        pool = Pool(
            name=owner.name,
            budget_option="host_budget",
            grow=self._arena.grow,
            block_bytes=_BLOCK_BYTES,
            least_piece_bytes=_LEAST_PIECE_BYTES,
            is_walled=True,
            capacity_bytes=capacity_bytes,
            granule_bytes=mmap.PAGESIZE,
        )
        super().__init__(
            owner=owner,
            slot_type=PinnedSlot,
            pool=pool,
            # Over the pool, the slots and the order of what is queued. Reentrant: a garbage collection inside may close
            # the tier.
            lock=threading.RLock(),
            device=engine.device,
            links=links,
            in_flight=self.in_flight,
            shut_down=functools.partial(_shut_down, engine, memory, owner),
        )
        self._keys = itertools.count()
        self._queued: dict[Stream, deque[StreamTransfer]] = {Stream.OUT: deque(), Stream.IN: deque()}
        self._measured: dict[LinkEstimate, deque[tuple[Event, Event, int]]] = {link: deque() for link in links}
        self._held: deque[tuple[Event, Event]] = deque()
        self._stall_s = 0.0

    @property
    def staging_bytes(self) -> int:
        """Return 0: the device copies directly between its memory and the slots."""
        return 0

    def close(self) -> None:
        """Block the host until all transfers have ended, and free the arena."""
        if self.owner.is_in_child():
            return
        with self.lock:
            self._finalizer()
            self._released.clear()
            self._pool.clear()
        for transfer in list(self.in_flight.values()):
            transfer.drop_storage()

    def take_stall_s(self) -> float:
        """Return the seconds of stall that have become known since the last call. See [Note: stall of a device]."""
        if self.owner.is_in_child():
            return 0.0
        self._drop_finished()
        with self.lock:
            stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def hold_compute(self, event: Event) -> None:
        """Make the compute stream of this thread wait for an event, and measure how long it waits."""
        engine = self.engine
        start = engine.mark(Stream.COMPUTE, is_timed=True)
        engine.follow(Stream.COMPUTE, event)
        self._held.append((start, engine.mark(Stream.COMPUTE, is_timed=True)))

    def start_copy(self, slot: PinnedSlot, storage: torch.UntypedStorage, *, is_read: bool) -> StreamTransfer:
        """Queue a copy in its stream."""
        self._drop_finished()
        stream = Stream.IN if is_read else Stream.OUT
        with self.lock:
            self._check_usable()
            transfer = StreamTransfer(self, next(self._keys), storage, is_read=is_read)
            if is_read and slot.failure is not None:
                transfer.error = slot.failure
            elif slot.size_bytes:
                self._queue(slot, memory_behind(storage), transfer, stream)
            if not is_read:
                slot.failure = transfer.error
            if transfer.event is None:
                transfer.drop_storage()
                return transfer
            self.in_flight[transfer.key] = transfer
            self._queued[stream].append(transfer)
        return transfer

    def _queue(self, slot: PinnedSlot, address: int, transfer: StreamTransfer, stream: Stream) -> None:
        """Queue a copy in its stream, after all that it must wait for: [Note: stream order] 1 and 2."""
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
        except BaseException:  # an interrupt: wait for the queued pieces before their memory can be freed
            engine.finish(engine.mark(stream))
            raise
        with contextlib.suppress(RuntimeError):  # if one piece was refused, the pieces before it are under way
            transfer.event = engine.mark(stream, is_timed=True)
            if is_read:
                slot.last_read = transfer.event
            else:
                slot.last_write = transfer.event
            if transfer.error is None:
                link = self._read_link if is_read else self._write_link
                self._measured[link].append((start, transfer.event, slot.size_bytes))

    def _drop_finished(self) -> None:
        """Drop the storages of copies that have ended, and read the timed events that were reached."""
        with self.lock, contextlib.suppress(RuntimeError):
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
        """Free the room of released slots: [Note: stream order] 5. Needs the lock."""
        while self._released:
            slot = self._released.popleft()
            if slot.last_read is not None:
                try:
                    if not self.engine.is_reached(slot.last_read):
                        self.engine.follow(Stream.OUT, slot.last_read)
                except RuntimeError as error:
                    raise TierIOError(f"the {self.name} tier's device has failed: {error}") from error
            self._pool.give_back(slot.extents)


def _shut_down(engine: Engine, memory: PinnedMemory, owner: Owner) -> None:
    """Wait until no copy runs, and unpin. Do nothing in a forked child."""
    if owner.is_in_child():
        return
    with contextlib.suppress(RuntimeError):  # a device that has failed runs no copies
        for stream in (Stream.OUT, Stream.IN):
            engine.finish(engine.mark(stream))
    memory.close()
