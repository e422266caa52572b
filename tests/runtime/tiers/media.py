"""Media for tests: pools in a bytearray whose copies happen when, and as, a test says."""

import ctypes
import random
import threading
import time

from torchdelta.runtime.tiers.jobs import Part


class ScriptedMedium:
    """A medium whose every copy waits for a permit, is written to a log, and may be told to fail."""

    name = "scripted"
    budget_option = "script_budget"
    block_bytes = 64
    part_bytes = 256
    least_piece_bytes = 64
    staging_bytes = 0
    is_walled = False
    start_write_bytes_per_s = 1e9
    start_read_bytes_per_s = 1e9

    def __init__(self, num_threads: int = 1, *, is_open: bool = False, limit_bytes: int | None = None) -> None:
        self.num_threads = num_threads
        self.limit_bytes = limit_bytes
        self.pool = bytearray()
        self.log: list[tuple[str, int]] = []
        self.failing: dict[str, Exception] = {}
        self.is_open = is_open
        self.permits = threading.Semaphore(0)
        self.has_begun = threading.Semaphore(0)
        self.num_closed = 0
        self.num_left = 0

    def open(self) -> None:
        """Let every copy through from now on."""
        self.is_open = True
        for _ in range(100):
            self.permits.release()

    def grow(self, from_bytes: int, add_bytes: int) -> None:
        """Grow the pool, if the limit allows."""
        if self.limit_bytes is not None and from_bytes + add_bytes > self.limit_bytes:
            raise OSError(28, "No space left on device")
        assert from_bytes == len(self.pool)
        self.pool.extend(bytes(add_bytes))

    def write_part(self, worker: int, part: Part) -> None:
        """Copy in, once permitted."""
        self._begin("write", worker, part)
        self.pool[part.offset_bytes : part.offset_bytes + part.size_bytes] = part.view

    def read_part(self, worker: int, part: Part) -> None:
        """Copy out, once permitted."""
        self._begin("read", worker, part)
        source = bytes(self.pool[part.offset_bytes : part.offset_bytes + part.size_bytes])
        ctypes.memmove(part.address, source, part.size_bytes)

    def close(self) -> None:
        """Count."""
        self.num_closed += 1

    def leave_child(self) -> None:
        """Count."""
        self.num_left += 1

    def _begin(self, kind: str, worker: int, part: Part) -> None:
        del worker
        self.has_begun.release()
        if not self.is_open:
            self.permits.acquire()
        self.log.append((kind, part.offset_bytes))
        if kind in self.failing:
            raise self.failing[kind]


class ErraticMedium(ScriptedMedium):
    """A medium with random delays that notices two copies at once in the same bytes, and copies after its close."""

    name = "erratic"

    def __init__(self, seed: int, num_threads: int = 3) -> None:
        super().__init__(num_threads, is_open=True)
        self.random = random.Random(seed)
        self.running: dict[int, range] = {}
        self.lock = threading.Lock()
        self.complaints: list[str] = []

    def write_part(self, worker: int, part: Part) -> None:
        """Copy in, slowly."""
        self._claim(worker, part)
        super().write_part(worker, part)
        self._leave(worker)

    def read_part(self, worker: int, part: Part) -> None:
        """Copy out, slowly."""
        self._claim(worker, part)
        super().read_part(worker, part)
        self._leave(worker)

    def _claim(self, worker: int, part: Part) -> None:
        mine = range(part.offset_bytes, part.offset_bytes + part.size_bytes)
        with self.lock:
            if self.num_closed:
                self.complaints.append("a copy after the close")
            for other in self.running.values():
                if mine.start < other.stop and other.start < mine.stop:
                    self.complaints.append(f"{mine} while {other}")
            self.running[worker] = mine
            pause_s = self.random.choice((0.0, 0.0, 1e-5, 1e-4, 5e-4))
        time.sleep(pause_s)

    def _leave(self, worker: int) -> None:
        with self.lock:
            del self.running[worker]
