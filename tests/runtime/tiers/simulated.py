"""A device that exists in the test only: streams that run when the simulator likes, and that notice every race.

[Note: what the simulator sees]
Copies and kernels are queued and run later, in any order that the streams and events allow, drawn from a seed. Beside
that, every access to memory is compared with the earlier accesses to the same bytes: two of which one writes, and
that no stream, event or host wait has put into an order (vector clocks: Lamport 1978, Mattern 1988), are a race, also
when this run happened to do them in the right order. Time passes whenever somebody calls.
"""

import ctypes
import mmap
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchdelta._torch.storages import storage_over
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.slots import SlotAllocator

Clock = dict[str, int]
HOST = "host"
POISON = 0xA5


class Event:
    """A mark in a queue."""

    def __init__(self, queue: str, clock: Clock) -> None:
        self.queue = queue
        self.clock = clock
        self.is_reached = False
        self.time_s = 0.0


@dataclass
class Work:
    """What stands in a queue: wait for an event, or act; then the event, if any, is reached."""

    act: Callable[[], None] | None = None
    awaited: Event | None = None
    reaches: Event | None = None


@dataclass
class Access:
    """Bytes that something in a queue reads or writes."""

    start: int
    stop: int
    is_write: bool
    queue: str
    tick: int
    what: str


@dataclass
class Faults:
    """What goes wrong, and when."""

    copies: set[int] = field(default_factory=set)  # the numbers of the copies that are refused
    pins_from_bytes: int | None = None  # pinning is refused once so much is pinned
    is_broken: bool = False  # every call fails, as after a failed copy on CUDA


def merge(into: Clock, other: Clock) -> None:
    """Let one clock know what another knows."""
    for name, tick in other.items():
        if tick > into.get(name, 0):
            into[name] = tick


class SimulatedEngine:
    """An `Engine` of which a test decides when what happens.

    Args:
        seed: Of all that is left to chance.
        is_eager: Whether the compute stream is the host itself, as for a program that really computes on the CPU. Else
            kernels are queued by `launch`.
    """

    def __init__(self, seed: int, *, is_eager: bool = False) -> None:
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        # How much gets done whenever somebody calls: much, little, or nothing until somebody waits for it.
        self.pace = self.random.choice(((0, 0, 1, 2, 4), (0, 0, 0, 1), (0,)))
        self.is_eager = is_eager
        self.faults = Faults()
        self.complaints: list[str] = []
        self.pinned: dict[int, int] = {}
        self.peak_pinned_bytes = 0
        self.num_copies = 0
        self.num_host_waits = 0
        self.time_s = 0.0
        self.lock = threading.RLock()
        self.queues: dict[str, deque[Work]] = {stream.value: deque() for stream in Stream}
        self.clocks: dict[str, Clock] = {name: {} for name in (*self.queues, HOST)}
        self.accesses: list[Access] = []

    # -- the engine

    def pin(self, address: int, size_bytes: int) -> None:
        """Note what is pinned."""
        with self.lock:
            limit_bytes = self.faults.pins_from_bytes
            if limit_bytes is not None and sum(self.pinned.values()) + size_bytes > limit_bytes:
                raise OSError("no more pages can be locked")
            self.pinned[address] = size_bytes
            self.peak_pinned_bytes = max(self.peak_pinned_bytes, sum(self.pinned.values()))

    def unpin(self, address: int) -> None:
        """Only what is pinned, and only when nothing in a queue needs it."""
        with self.lock:
            self._check_alive()
            size_bytes = self.pinned.pop(address)
            host = self.clocks[HOST]
            for access in self.accesses:
                is_inside = access.start < address + size_bytes and address < access.stop
                if is_inside and host.get(access.queue, 0) < access.tick:
                    self.complaints.append(f"{access.what} was under way when its host memory was unpinned")

    def mark(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Put an event into a queue."""
        del is_timed
        with self.lock:
            self._check_alive()
            self._pass_time()
            name = stream.value
            if self.is_eager and stream is Stream.COMPUTE:
                event = Event(HOST, dict(self.clocks[HOST]))
                event.is_reached = True
                event.time_s = self.time_s
                return event
            self._tick(name)
            event = Event(name, dict(self.clocks[name]))
            self.queues[name].append(Work(reaches=event))
            return event

    def follow(self, stream: Stream, event: Event) -> None:
        """Let a queue wait."""
        with self.lock:
            self._check_alive()
            self._pass_time()
            if self.is_eager and stream is Stream.COMPUTE:
                self._run_until(event)
                return
            name = stream.value
            self._tick(name)
            merge(self.clocks[name], event.clock)
            self.queues[name].append(Work(awaited=event))

    def copy(self, stream: Stream, *, to_address: int, from_address: int, size_bytes: int) -> None:
        """Queue a copy; it takes pageable memory too, but then the host waits."""
        with self.lock:
            self._check_alive()
            self._pass_time()
            number = self.num_copies
            self.num_copies += 1
            if number in self.faults.copies:
                raise RuntimeError("CUDA error: the simulated copy is refused\nmore lines of advice")
            what = f"copy {number} {stream.value} of {size_bytes} bytes"
            self._queue(
                stream.value,
                lambda: _move(to_address, from_address, size_bytes),
                reads=[(from_address, size_bytes)],
                writes=[(to_address, size_bytes)],
                what=what,
            )
            if self.is_eager and stream is Stream.IN:
                ctypes.memset(to_address, POISON, size_bytes)
            host = from_address if stream is Stream.IN else to_address
            if not any(start <= host and host + size_bytes <= start + size for start, size in self.pinned.items()):
                self.finish(self.mark(stream))

    def is_reached(self, event: Event) -> bool:
        """Look, and let some time pass first."""
        with self.lock:
            self._check_alive()
            self._pass_time()
            if event.is_reached:
                merge(self.clocks[HOST], event.clock)
                self._forget_ordered()
            return event.is_reached

    def finish(self, event: Event) -> None:
        """Block the host."""
        with self.lock:
            self._check_alive()
            self.num_host_waits += 1
            self._run_until(event)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Subtract."""
        assert start.is_reached
        assert end.is_reached
        return end.time_s - start.time_s

    # -- for tests

    def launch(
        self, act: Callable[[], None], *, reads: list[tuple[int, int]], writes: list[tuple[int, int]], what: str
    ) -> None:
        """Queue a kernel on the compute stream."""
        with self.lock:
            self._pass_time()
            self._queue(Stream.COMPUTE.value, act, reads=reads, writes=writes, what=what)

    def settle(self) -> None:
        """Run everything that is queued."""
        with self.lock:
            for name, queue in self.queues.items():
                while queue:
                    if not self._advance():
                        raise AssertionError(f"deadlock: {name} waits for what never comes")
            for clock in list(self.clocks.values()):
                merge(self.clocks[HOST], clock)
            self.accesses.clear()

    def _check_alive(self) -> None:
        if self.faults.is_broken:
            raise RuntimeError("CUDA error: the simulated device has failed")

    def _tick(self, name: str) -> int:
        clock = self.clocks[name]
        merge(clock, self.clocks[HOST])
        clock[name] = clock.get(name, 0) + 1
        return clock[name]

    def _queue(
        self,
        name: str,
        act: Callable[[], None],
        *,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
        what: str,
    ) -> None:
        tick = self._tick(name)
        clock = self.clocks[name]
        for is_write, ranges in ((False, reads), (True, writes)):
            for start, size_bytes in ranges:
                access = Access(start, start + size_bytes, is_write, name, tick, what)
                for earlier in self.accesses:
                    if (
                        earlier.start < access.stop
                        and access.start < earlier.stop
                        and (is_write or earlier.is_write)
                        and clock.get(earlier.queue, 0) < earlier.tick
                    ):
                        self.complaints.append(f"nothing orders {what} after {earlier.what}")
                self.accesses.append(access)
        self.queues[name].append(Work(act=act))

    def _pass_time(self) -> None:
        for _ in range(self.random.choice(self.pace)):
            self._advance()

    def _advance(self) -> bool:
        """Run the head of one queue whose head can run."""
        ready = [
            queue
            for queue in self.queues.values()
            if queue and (queue[0].awaited is None or queue[0].awaited.is_reached)
        ]
        if not ready:
            return False
        work = self.random.choice(ready).popleft()
        self.time_s += self.random.choice((1e-6, 1e-5))
        if work.act is not None:
            work.act()
        if work.reaches is not None:
            work.reaches.is_reached = True
            work.reaches.time_s = self.time_s
        return True

    def _run_until(self, event: Event) -> None:
        while not event.is_reached:
            if not self._advance():
                raise AssertionError(f"deadlock: the host waits for an event of {event.queue} that never comes")
        merge(self.clocks[HOST], event.clock)
        self._forget_ordered()

    def _forget_ordered(self) -> None:
        """Drop what the host knows to be over: whatever comes, comes after it."""
        host = self.clocks[HOST]
        self.accesses = [access for access in self.accesses if host.get(access.queue, 0) < access.tick]


class SimulatedDevice:
    """Memory of so many bytes, handed on in the order of the compute stream as CUDA's caching allocator does.

    Contents follow from a number, so that a kernel can make and check them.
    """

    def __init__(self, engine: SimulatedEngine, budget_bytes: int) -> None:
        self.engine = engine
        self.budget_bytes = budget_bytes
        self._memory = mmap.mmap(-1, budget_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._allocator = SlotAllocator(64)
        self._allocator.grow(budget_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all storages alive, rounded up."""
        return self._allocator.used_bytes

    @property
    def complaints(self) -> list[str]:
        """All that went wrong so far."""
        return self.engine.complaints

    def allocate(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Hand out memory with garbage in it, or None where there is no room in one piece."""
        extents = self._allocator.take(size_bytes)
        if extents is None:
            return None
        address = self._base + (extents[0].offset_bytes if extents else 0)
        storage = storage_over(address, size_bytes, torch.device("cpu"))
        weakref.finalize(storage, self._allocator.give_back, extents)
        self.engine.launch(
            lambda: ctypes.memset(address, POISON, size_bytes),
            reads=[],
            writes=[(address, size_bytes)],
            what="the first use of fresh memory",
        )
        return storage

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        """Launch a kernel that makes the content of a number."""
        address, size_bytes = storage.data_ptr(), storage.nbytes()
        self.engine.launch(
            lambda: _move_bytes(address, content_of(number, size_bytes)),
            reads=[],
            writes=[(address, size_bytes)],
            what=f"the kernel that makes content {number}",
        )

    def check(self, storage: torch.UntypedStorage, number: int) -> None:
        """Launch a kernel that compares with the content of a number."""
        address, size_bytes = storage.data_ptr(), storage.nbytes()

        def compare() -> None:
            if ctypes.string_at(address, size_bytes) != content_of(number, size_bytes):
                self.complaints.append(f"a kernel found other bytes than content {number}")

        self.engine.launch(
            compare, reads=[(address, size_bytes)], writes=[], what=f"the kernel that checks content {number}"
        )

    def settle(self) -> None:
        """Finish all work."""
        self.engine.settle()


def content_of(number: int, size_bytes: int) -> bytes:
    """Return bytes that differ from number to number and from place to place."""
    return random.Random(number).randbytes(size_bytes)


def _move(to_address: int, from_address: int, size_bytes: int) -> None:
    ctypes.memmove(to_address, from_address, size_bytes)


def _move_bytes(to_address: int, content: bytes) -> None:
    ctypes.memmove(to_address, content, len(content))
