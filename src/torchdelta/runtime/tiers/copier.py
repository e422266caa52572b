"""Background copies between storages and a tier's medium: a few threads, two queues, order within each slot.

A job (one transfer) is cut into parts of a few MiB, and threads take part after part: the copy through memory of one
part runs beside the disk access of another, and a read that a step waits for never stands behind a large write for
longer than one part.

[Note: Threads and memory]
The threads know addresses, never storages: a storage is held by its `CopyTransfer`, which is dropped on a caller's
thread only (`wait`, `is_done`, or the tier's next call). So no tensor memory is allocated or freed by these threads -
but for one case that pure Python cannot exclude: the cyclic garbage collector may happen to run on any thread that
allocates, and frees what it finds. The threads allocate almost nothing per part to make that rare; code with
finalizers must be ready for it, as with any other thread in the process.

[Note: Finalizers]
`release()` is called from finalizers, which the collector may run on a thread that is inside this package, with a
lock held. What a finalizer can reach takes no lock with blocking.

[Note: Shutdown]
`is_closing` is read under a worker's `io_lock` before every part. Once `shutdown` has set it and has held each
`io_lock` once, no copy runs or will run, so memory may go. That works without a join, which matters where the
collector runs `shutdown` on a worker itself.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.tiers.bandwidth import LinkEstimate
from torchdelta.runtime.tiers.base import Slot

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.slots import Extent

__all__ = ["Copier", "CopyTransfer", "Job", "Medium", "Part", "PooledSlot"]


class Part:
    """A piece of a transfer that one thread copies at one go."""

    __slots__ = ("address", "after", "index", "offset_bytes", "size_bytes", "slot", "view")

    def __init__(
        self, *, slot: PooledSlot, index: int, offset_bytes: int, size_bytes: int, address: int, view: memoryview
    ) -> None:
        self.slot = slot
        self.index = index
        self.offset_bytes = offset_bytes  # in the pool
        self.size_bytes = size_bytes
        self.address = address  # of the storage's bytes
        self.view = view  # the same bytes, made by the caller so that the thread need not allocate
        self.after: Any = None  # the event that a device's copy has to follow; views of its memory are never read


class Medium(Protocol):
    """What a pooled tier stores its bytes in. Only `write_part` and `read_part` are called by the copier's threads."""

    name: str
    budget_option: str  # the option that limits it, for messages
    block_bytes: int  # slots lie on, and are rounded up to, multiples of this
    part_bytes: int  # the longest part that one thread copies at one go; a multiple of the block
    least_piece_bytes: int  # scatter a slot over pieces of this size sooner than grow
    num_threads: int
    staging_bytes: int
    is_walled: bool  # whether each growth is a place of its own, over whose seam no extent may lie
    start_write_bytes_per_s: float
    start_read_bytes_per_s: float

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Make room behind the first `from_bytes`; raises OSError or MemoryError and then has changed nothing."""
        ...

    def write_part(self, worker: int, part: Part) -> None:
        """Copy one part into the pool."""
        ...

    def read_part(self, worker: int, part: Part) -> None:
        """Copy one part out of the pool."""
        ...

    def close(self) -> None:
        """Drop everything held; called once, when no copy runs any more."""
        ...

    def leave_child(self) -> None:
        """Drop what a forked child inherited, without any effect on the parent."""
        ...


class PooledSlot(Slot):
    """A slot that lies in a pool, and the jobs that concern it in the order in which they were started."""

    __slots__ = ("checksums", "extents", "failure", "is_released", "is_written", "jobs", "num_reads", "owner")

    def __init__(self, size_bytes: int, extents: tuple[Extent, ...], owner: Copier) -> None:
        super().__init__(size_bytes)
        self.extents = extents
        self.owner = owner
        self.jobs: deque[Job] = deque()
        self.num_reads = 0  # among jobs
        self.failure: BaseException | None = None  # of the last write: reads must not return what it left
        self.checksums: dict[int, int] = {}  # part index -> checksum of what was written, where the medium keeps any
        self.is_written = False
        self.is_released = False


class Job:
    """One transfer as the threads see it."""

    __slots__ = (
        "done",
        "error",
        "is_finished",
        "is_read",
        "is_urgent",
        "key",
        "next_part",
        "num_running",
        "parts",
        "slot",
    )

    def __init__(self, key: int, slot: PooledSlot, parts: list[Part], *, is_read: bool) -> None:
        self.key = key
        self.slot = slot
        self.parts = parts
        self.is_read = is_read
        self.is_urgent = False
        self.next_part = 0
        self.num_running = 0
        self.error: BaseException | None = None
        self.is_finished = False
        self.done = threading.Lock()  # held until the job has finished: lighter than an Event
        self.done.acquire()


class CopyTransfer:
    """One copy in flight, as the caller sees it; keeps the storage alive until the copy has ended."""

    __slots__ = ("_copier", "_job", "_storage", "size_bytes")

    def __init__(self, copier: Copier, job: Job, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self._copier = copier
        self._job = job
        self._storage: torch.UntypedStorage | None = storage
        self.size_bytes = size_bytes

    def is_done(self) -> bool:
        """Tell, without blocking, whether the copy has ended, well or badly."""
        if not self._job.is_finished:
            return False
        self.drop_storage()
        return True

    def wait(self) -> float:
        """Block until the copy has ended, and return the seconds that this took; see `base.Transfer`."""
        job = self._job
        stall_s = 0.0
        if not job.is_finished:
            self._copier.check_process()
            start_s = time.perf_counter()
            job.done.acquire()
            job.done.release()  # the next one that waits may pass as well
            stall_s = time.perf_counter() - start_s
        self.drop_storage()
        if job.error is not None:
            verb = "read" if job.is_read else "write"
            raise TierIOError(
                f"the {self._copier.medium.name} tier could not {verb} a buffer of {self.size_bytes} bytes: {job.error}"
            ) from job.error
        return stall_s

    def drop_storage(self) -> None:
        """Let go of the storage of a finished copy; on a caller's thread, see [Note: Threads and memory]."""
        self._storage = None
        self._copier.in_flight.pop(self._job.key, None)


class Copier:
    """The threads of one tier, and what they are to do next."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.process_id = os.getpid()
        self.is_closing = False
        self.write_link = LinkEstimate(medium.start_write_bytes_per_s)
        self.read_link = LinkEstimate(medium.start_read_bytes_per_s)
        # Transfers that may still be copying, so that a caller who drops one early does not free memory under a copy.
        self.in_flight: dict[int, CopyTransfer] = {}
        self._finished_keys: deque[int] = deque()
        self._keys = itertools.count()
        self._lock = threading.Lock()  # over the two queues, every slot's jobs and the link estimates
        self._urgent: deque[Job] = deque()  # reads, and writes that a read waits for
        self._normal: deque[Job] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one for each part that is ready, at least
        self._io_locks = [threading.Lock() for _ in range(medium.num_threads)]
        self._threads: list[threading.Thread] = []
        try:
            for worker in range(medium.num_threads):
                thread = threading.Thread(
                    target=_work, args=(self, worker), name=f"torchdelta-{medium.name}-{worker}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.shutdown()
            raise TierError(f"the {medium.name} tier cannot start its threads: {error}") from error

    def check_process(self) -> None:
        """Refuse to work in a forked child, which has the tier's memory but neither its threads nor its file."""
        if os.getpid() != self.process_id:
            raise TierError(
                f"the {self.medium.name} tier belongs to process {self.process_id}: a forked child cannot use it"
            )

    def start(
        self, slot: PooledSlot, parts: list[Part], storage: torch.UntypedStorage, *, is_read: bool
    ) -> CopyTransfer:
        """Queue a transfer behind the earlier ones of its slot."""
        self.drop_finished()
        job = Job(next(self._keys), slot, parts, is_read=is_read)
        transfer = CopyTransfer(self, job, storage, slot.size_bytes)
        with self._lock:
            if self.is_closing:
                raise TierError(f"the {self.medium.name} tier is closed")
            self.in_flight[job.key] = transfer
            slot.jobs.append(job)
            slot.num_reads += job.is_read
            head = slot.jobs[0]
            if head is job:
                self._start_next(slot)
            elif job.is_read and not head.is_urgent:
                head.is_urgent = True
                if head.next_part < len(head.parts):
                    self._normal.remove(head)
                    self._urgent.append(head)
        return transfer

    def drop_finished(self) -> None:
        """Let go of the storages of finished transfers that nobody waited for; see [Note: Threads and memory]."""
        while self._finished_keys:
            transfer = self.in_flight.get(self._finished_keys.popleft())
            if transfer is not None:
                transfer.drop_storage()

    def cancel_unstarted_write(self, slot: PooledSlot) -> None:
        """Skip the write of a released slot if nothing of it has happened yet; best effort, never blocks."""
        # [Note: Finalizers]
        if not self._lock.acquire(blocking=False):
            return
        try:
            if len(slot.jobs) == 1:
                job = slot.jobs[0]
                if not job.is_read and job.next_part == 0 and job.parts:
                    (self._urgent if job.is_urgent else self._normal).remove(job)
                    self._finish(job)
        finally:
            self._lock.release()

    def shutdown(self) -> None:
        """End all copying: running parts are waited for, the others fail. Repeats are ignored."""
        if os.getpid() != self.process_id or self.is_closing:
            return
        self.is_closing = True
        for _ in self._threads:
            self._tokens.put(None)
        others = [
            (thread, io_lock)
            for thread, io_lock in zip(self._threads, self._io_locks, strict=False)
            if thread is not threading.current_thread()
        ]
        for _, io_lock in others:  # [Note: Shutdown]
            with io_lock:
                pass
        if len(others) == len(self._threads):  # not on a worker, which would wait for itself
            for thread, _ in others:
                thread.join()
            self.fail_queued()
            self.drop_finished()
        self.medium.close()

    def fail_queued(self) -> None:
        """Fail what has not begun, once `is_closing` is set; parts that run end their jobs themselves."""
        with self._lock:
            for queue in (self._urgent, self._normal):
                while queue:
                    job = queue.popleft()
                    job.next_part = len(job.parts)
                    job.error = job.error or _closed_error()
                    if job.num_running == 0:
                        self._finish(job)

    def take_part(self) -> tuple[Job, Part] | None:
        """Claim the next part: of reads first, then of writes. None if the token was one too many."""
        with self._lock:
            queue = self._urgent or self._normal
            if not queue:
                return None
            job = queue[0]
            part = job.parts[job.next_part]
            job.next_part += 1
            if job.next_part == len(job.parts):
                queue.popleft()
            job.num_running += 1
            (self.read_link if job.is_read else self.write_link).start(time.perf_counter())
            return job, part

    def copy_part(self, worker: int, job: Job, part: Part) -> BaseException | None:
        """Copy, unless the tier is closing; returns what went wrong."""
        with self._io_locks[worker]:
            if self.is_closing:
                return _closed_error()
            try:
                if job.is_read:
                    self.medium.read_part(worker, part)
                else:
                    self.medium.write_part(worker, part)
            except BaseException as error:  # noqa: BLE001 (a thread that dies would leave its callers waiting)
                # Without its traceback, which would keep this thread's frames and all they refer to.
                return error.with_traceback(None)
            return None

    def end_part(self, job: Job, part: Part, error: BaseException | None) -> None:
        """Note that a part has ended, and with the last one the job."""
        with self._lock:
            link = self.read_link if job.is_read else self.write_link
            link.end(time.perf_counter(), part.size_bytes if error is None else 0)
            job.num_running -= 1
            if error is not None and job.error is None:
                job.error = error
                if job.next_part < len(job.parts):
                    (self._urgent if job.is_urgent else self._normal).remove(job)
                    job.next_part = len(job.parts)
            if job.num_running == 0 and job.next_part == len(job.parts):
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """End the head of a slot's jobs and let the next begin. Needs the lock."""
        slot = job.slot
        slot.jobs.popleft()
        if job.is_read:
            slot.num_reads -= 1
        else:
            slot.failure = job.error
        job.is_finished = True
        self._finished_keys.append(job.key)
        job.done.release()
        self._start_next(slot)

    def _start_next(self, slot: PooledSlot) -> None:
        """Make the head of a slot's jobs ready to run. Needs the lock."""
        if not slot.jobs:
            return
        job = slot.jobs[0]
        if self.is_closing:
            job.error = _closed_error()
        elif job.is_read:
            job.error = slot.failure
        if job.error is not None or not job.parts:
            self._finish(job)
            return
        job.is_urgent = slot.num_reads > 0
        (self._urgent if job.is_urgent else self._normal).append(job)
        for _ in job.parts:
            self._tokens.put(None)


def _closed_error() -> TierIOError:
    return TierIOError("the tier was closed before the copy had ended")


def _work(copier: Copier, worker: int) -> None:
    """Run one thread: copy part after part until the copier closes."""
    tokens = copier._tokens
    while True:
        tokens.get()
        if copier.is_closing:
            copier.fail_queued()
            return
        claim = copier.take_part()
        if claim is None:
            continue
        job, part = claim
        error = copier.copy_part(worker, job, part)
        copier.end_part(job, part, error)
        del claim, job, part, error  # a thread that idles must keep nothing alive
