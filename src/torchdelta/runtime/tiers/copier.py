"""Background copies between storages and a tier's medium: a few threads, two queues, order within each slot.

A job (one transfer) is split into parts of a few MiB, and threads take one part at a time. So the memory copy of one
part overlaps the disk access of another, and what a step waits for is delayed by another copy for one part at most:
reads go before writes, and the next copy of a slot that a caller waits for goes before all others.

[Note: Threads and memory]
The threads have addresses, never storages: the `CopyTransfer` holds the storage and drops it on a caller's thread only
(`wait`, `is_done`, or the tier's next call). So these threads neither allocate nor free tensor memory, with one
exception that pure Python cannot exclude: the cyclic garbage collector may run on any thread that allocates. The
threads allocate almost nothing per part, which makes that rare. Code with finalizers must expect it, as on any other
thread.

[Note: Finalizers]
Finalizers call `release()`, and the collector may run them on a thread that is inside this package and holds a lock.
Therefore no code that a finalizer can reach blocks on a lock.

[Note: No memory]
A thread that dies leaves its callers waiting forever, and so does a job that nobody ends. So the code that takes or
ends a part allocates before it changes anything, or catches MemoryError. `contextlib.suppress` allocates.

[Note: Shutdown]
A worker reads `is_closing` under its `io_lock` before every part. Once `shutdown` has set it and has taken each
`io_lock` once, no copy runs or will run, so the memory may be freed. This needs no join, which would deadlock where the
collector runs `shutdown` on a worker.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from torchdelta.errors import TierError, TierIOError
from torchdelta.runtime.tiers.bandwidth import LinkEstimate
from torchdelta.runtime.tiers.jobs import Job
from torchdelta.runtime.tiers.slotted import Owner, copy_error

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.jobs import Medium, Part, PooledSlot

__all__ = ["Copier", "CopyTransfer"]


class CopyTransfer:
    """One transfer, for the caller; keeps the storage, or whatever owns the memory, alive until the copy has ended."""

    __slots__ = ("_copier", "_job", "_storage", "size_bytes")

    def __init__(self, copier: Copier, job: Job, storage: object, size_bytes: int) -> None:
        self._copier = copier
        self._job = job
        self._storage: object | None = storage
        self.size_bytes = size_bytes

    def is_done(self) -> bool:
        """Return, without blocking, whether the copy has succeeded or failed."""
        if not self._job.is_finished:
            return False
        self.drop_storage()
        return True

    def wait(self) -> float:
        """Block until the copy has ended, and return the seconds that this took; see `base.Transfer`."""
        job = self._job
        stall_s = 0.0
        if not job.is_finished:
            self._copier.owner.check_process()
            start_s = time.perf_counter()
            self._copier.hurry(job)
            job.done.acquire()
            job.done.release()  # for other threads that wait
            stall_s = time.perf_counter() - start_s
        self.drop_storage()
        if job.error is not None:
            raise copy_error(self._copier.owner.name, job.error, self.size_bytes, is_read=job.is_read) from job.error
        return stall_s

    def drop_storage(self) -> None:
        """Drop the storage of a finished copy; on a caller's thread, see [Note: Threads and memory]."""
        self._storage = None
        self._copier.in_flight.pop(self._job.key, None)


class Copier:
    """The threads of one tier and their queues."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.owner = Owner(medium.name)
        self.is_closing = False
        self.write_link = LinkEstimate(medium.start_write_bytes_per_s)
        self.read_link = LinkEstimate(medium.start_read_bytes_per_s)
        # Transfers that may still be copying: a caller that drops one early must not free memory during the copy.
        self.in_flight: dict[int, CopyTransfer] = {}
        self._finished_keys: deque[int] = deque()
        self._keys = itertools.count()
        self.lock = threading.Lock()  # protects the two queues, every slot's jobs and the link estimates
        self._urgent: deque[Job] = deque()  # reads, and writes that a read or a caller waits for
        self._normal: deque[Job] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()  # at least one for each part that is ready
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

    def start(
        self, slot: PooledSlot, parts: list[Part], storage: object, *, is_read: bool, is_measured: bool = True
    ) -> CopyTransfer:
        """Queue a transfer behind the earlier ones of its slot. `storage` owns the memory of the parts."""
        self.drop_finished()
        job = Job(next(self._keys), slot, parts, is_read=is_read, is_measured=is_measured)
        transfer = CopyTransfer(self, job, storage, slot.size_bytes)
        with self.lock:
            if self.is_closing:
                raise TierError(f"the {self.medium.name} tier is closed")
            slot.jobs.append(job)
            try:
                self.in_flight[job.key] = transfer
            except MemoryError:  # else `drain` would wait for a job that never starts
                slot.jobs.pop()
                raise
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

    def hurry(self, job: Job) -> None:
        """Copy the first transfer of a slot next, because a caller waits for this one."""
        with self.lock:
            if not job.is_finished:
                self._move_to_front(job.slot.jobs[0])

    def _move_to_front(self, job: Job) -> None:
        """Make a started job the first of all that are ready. Needs the lock."""
        if job.next_part == job.num_parts:
            return
        if job.is_urgent:  # [Note: No memory]: in place
            urgent = self._urgent
            for place in range(urgent.index(job), 0, -1):
                urgent[place] = urgent[place - 1]
            urgent[0] = job
        else:
            self._urgent.appendleft(job)
            self._normal.remove(job)
            job.is_urgent = True

    def drop_finished(self) -> None:
        """Drop the storages of finished transfers without a `wait()`; see [Note: Threads and memory]."""
        with contextlib.suppress(IndexError):  # none is left: another thread may have taken the last one
            while True:
                transfer = self.in_flight.get(self._finished_keys.popleft())
                if transfer is not None:
                    transfer.drop_storage()

    def cancel_unstarted_write(self, slot: PooledSlot) -> None:
        """Skip the write of a released slot if it has not started; best effort, never blocks."""
        # [Note: Finalizers]
        if not self.lock.acquire(blocking=False):
            return
        try:
            if len(slot.jobs) == 1:
                job = slot.jobs[0]
                if not job.is_read and job.next_part == 0 and job.parts:
                    (self._urgent if job.is_urgent else self._normal).remove(job)
                    self._finish(job)
        finally:
            self.lock.release()

    def shutdown(self) -> None:
        """Stop copying: wait for running parts, fail the others. Repeated calls do nothing."""
        if self.owner.is_in_child() or self.is_closing:
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
        """Fail the jobs that have not started, once `is_closing` is set; running parts end their jobs themselves."""
        with self.lock:
            for queue in (self._urgent, self._normal):
                while queue:
                    self._fail(queue.popleft(), _CLOSED)

    def fail_next(self, error: BaseException) -> None:
        """Fail the job of which no part can be taken."""
        with self.lock:
            queue = self._urgent or self._normal
            if queue:
                self._fail(queue.popleft(), error)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Fail a job that was taken off its queue. If parts of it run, the last of them ends it. Needs the lock."""
        job.next_part = job.num_parts
        job.error = job.error or error
        if job.num_running == 0:
            self._finish(job)

    def take_part(self) -> tuple[Job, Part] | None:
        """Return the next part, of urgent jobs first. None if no part is ready. After an error, nothing has changed."""
        with self.lock:
            queue = self._urgent or self._normal
            if not queue:
                return None
            job = queue[0]
            claim = job, job.parts[job.next_part]
            next_part = job.next_part + 1
            if job.is_measured:
                (self.read_link if job.is_read else self.write_link).start(time.perf_counter())
            job.next_part = next_part  # from here on nothing is allocated: [Note: No memory]
            if next_part == job.num_parts:
                queue.popleft()
            job.num_running += 1
            return claim

    def copy_part(self, worker: int, job: Job, part: Part) -> BaseException | None:
        """Copy a part, unless the tier is closing. Return the error, or None."""
        with self._io_locks[worker]:
            if self.is_closing:
                return _CLOSED
            try:
                if job.is_read:
                    self.medium.read_part(worker, part)
                else:
                    self.medium.write_part(worker, part)
            except BaseException as error:  # noqa: BLE001 (if the thread died, its callers would wait forever)
                # Without its traceback, which would keep this thread's frames alive.
                return error.with_traceback(None)
            return None

    def end_part(self, job: Job, part: Part, error: BaseException | None, cpu_s: float) -> None:
        """End a part, which took so much processor time, and with the last part its job."""
        with self.lock:
            if job.is_measured:
                link = self.read_link if job.is_read else self.write_link
                try:  # noqa: SIM105 - [Note: No memory]
                    link.end(time.perf_counter(), part.size_bytes if error is None else 0, cpu_s)
                except MemoryError:
                    pass
            job.num_running -= 1
            if error is not None and job.error is None:
                job.error = error
                if job.next_part < job.num_parts:
                    (self._urgent if job.is_urgent else self._normal).remove(job)
                    job.next_part = job.num_parts
            if job.num_running == 0 and job.next_part == job.num_parts:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """End the first of a slot's jobs and start the next. Needs the lock."""
        slot = job.slot
        slot.jobs.popleft()
        if job.is_read:
            slot.num_reads -= 1
        else:
            slot.failure = job.error
        job.is_finished = True
        try:  # noqa: SIM105 - [Note: No memory]
            self._finished_keys.append(job.key)
        except MemoryError:  # then `wait`, `is_done` or `drain` drops its storage
            pass
        job.done.release()
        self._start_next(slot)

    def _start_next(self, slot: PooledSlot) -> None:
        """Queue the first of a slot's jobs. Needs the lock."""
        if not slot.jobs:
            return
        job = slot.jobs[0]
        if self.is_closing:
            job.error = _CLOSED
        elif job.is_read:
            job.error = slot.failure
        if job.error is not None or not job.parts:
            self._finish(job)
            return
        job.is_urgent = slot.num_reads > 0
        queue = self._urgent if job.is_urgent else self._normal
        try:
            queue.append(job)
            for _ in job.parts:
                self._tokens.put(None)
        except MemoryError as error:  # without a token no thread would look for it
            if queue and queue[-1] is job:
                queue.pop()
            job.error = error.with_traceback(None)
            self._finish(job)


_CLOSED: Final = TierIOError("the tier was closed before the copy had ended")  # a cause, never raised itself


def _work(copier: Copier, worker: int) -> None:
    """Run one thread: copy part after part until the copier closes."""
    tokens = copier._tokens  # noqa: SLF001 - the copier's own thread
    while True:
        tokens.get()
        if copier.is_closing:
            copier.fail_queued()
            return
        try:
            claim = copier.take_part()
        except MemoryError as no_memory:
            copier.fail_next(no_memory.with_traceback(None))
            continue
        if claim is None:
            continue
        job, part = claim
        cpu_s = 0.0
        try:
            began_cpu_s = time.thread_time()
            error = copier.copy_part(worker, job, part)
            cpu_s = time.thread_time() - began_cpu_s
        except MemoryError as no_memory:
            error = no_memory.with_traceback(None)
        copier.end_part(job, part, error, cpu_s)
        del claim, job, part, error  # an idle thread must not keep objects alive
