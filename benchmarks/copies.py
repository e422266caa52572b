"""What copies take from a training that runs beside them, in seconds of its steps for each gigabyte.

On a CPU, copies take the cores that compute, and more time from a step than the copying threads run: interrupts and, in
a virtual machine, the disk's work on the host ("stolen") take time, too.

A thread swaps buffers of its own through the disk tier at a fixed rate, while a model trains plainly: no budget,
nothing of the training is moved. *In place* buffers begin at a page, as blocks of the caching allocator do (from Linux
5.8 on, where the swap directory has direct I/O); *staged* ones do not, as blocks of glibc's heap.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.turns import timed_steps
from torchdelta.host import read_stolen_s

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.runtime.tiers.base import Tier

CHUNK_BYTES = 8 * 2**20
NUM_CHUNKS = 12
BYTES_PER_S = 4e8
NUM_STEPS = 3
SHIFTS_BYTES = {"in place": 0, "staged": 64}  # of the first byte from the start of a page
WAYS = ("write", "read")
GB = 1e9


def measure(model: str, num_rounds: int) -> dict[str, Any]:
    """Train a model beside each kind of copy, as a worker. Return the rounds, and the medians by kind."""
    from torchdelta.runtime.tiers import open_tier

    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)

    def train() -> None:
        workload.train(optimizer)

    timed_steps(train, NUM_STEPS)
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(num_rounds):
        for kind, shift_bytes in SHIFTS_BYTES.items():
            with contextlib.closing(open_tier("disk")) as tier:
                buffers = _Buffers(tier, shift_bytes)
                for way in WAYS:
                    rounds.setdefault(f"{kind}, {way}", []).append(_lost(train, buffers, way))
    medians = {
        kind: {key: statistics.median(found[key] for found in samples) for key in samples[0]}
        for kind, samples in rounds.items()
    }
    return {"rounds": rounds, "medians": medians}


class _Buffers:
    """Buffers of this process and their places in a disk tier."""

    def __init__(self, tier: Tier, shift_bytes: int) -> None:
        self.tier = tier
        size_bytes = CHUNK_BYTES - mmap.PAGESIZE  # the same for both kinds
        maps = [mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(NUM_CHUNKS)]
        tensors = [torch.frombuffer(one, dtype=torch.uint8, offset=shift_bytes, count=size_bytes) for one in maps]
        self._storages = [tensor.fill_(1).untyped_storage() for tensor in tensors]
        self._slots = [tier.reserve(storage.nbytes()) for storage in self._storages]
        for number in range(NUM_CHUNKS):
            self.move(number, "write")

    def move(self, number: int, way: str) -> int:
        """Copy a buffer and wait for it. Return its size."""
        index = number % NUM_CHUNKS
        storage = self._storages[index]
        (self.tier.read if way == "read" else self.tier.write)(self._slots[index], storage).wait()
        return storage.nbytes()


def _lost(train: Callable[[], None], buffers: _Buffers, way: str) -> dict[str, float]:
    """Return what copies take from steps, beside steps right before and after without copies; per gigabyte."""
    before_s, stolen_before_s = _block_s(train)
    with _copying(buffers, way) as moved_bytes:
        size_bytes = 0
        while not size_bytes:  # on a busy machine, a few quick steps may end before the first copy does
            began_bytes = sum(moved_bytes)
            beside_s, stolen_beside_s = _block_s(train)
            size_bytes = sum(moved_bytes) - began_bytes
    after_s, stolen_after_s = _block_s(train)
    plain_s = (before_s + after_s) / 2
    stolen_s = stolen_beside_s - (stolen_before_s + stolen_after_s) / 2
    tier = buffers.tier
    cpu_s_per_byte = tier.read_cpu_s_per_byte if way == "read" else tier.write_cpu_s_per_byte
    return {
        "lost_s_per_gb": (beside_s - plain_s) / size_bytes * GB,
        "cpu_s_per_gb": cpu_s_per_byte * GB,
        "stolen_s_per_gb": stolen_s / size_bytes * GB,
        "lost_s_per_taken_s": (beside_s - plain_s) / (size_bytes * cpu_s_per_byte + stolen_s),
        "gb_per_step": size_bytes / NUM_STEPS / GB,
    }


def _block_s(train: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of some steps, and the processor time that was stolen meanwhile."""
    began_s = read_stolen_s() or 0.0
    time_s = sum(timed_steps(train, NUM_STEPS)["times_s"])
    return time_s, (read_stolen_s() or 0.0) - began_s


@contextlib.contextmanager
def _copying(buffers: _Buffers, way: str) -> Generator[list[int]]:
    """Copy buffers on another thread, at a fixed rate. Yields the sizes of those copied so far."""
    is_over = threading.Event()
    moved_bytes: list[int] = []

    def copy() -> None:
        began_s = time.perf_counter()
        while not is_over.is_set():
            moved_bytes.append(buffers.move(len(moved_bytes), way))
            ahead_s = sum(moved_bytes) / BYTES_PER_S - (time.perf_counter() - began_s)
            is_over.wait(max(0.0, ahead_s))

    with ThreadPoolExecutor(max_workers=1) as thread:
        copies = thread.submit(copy)
        try:
            yield moved_bytes
        finally:
            is_over.set()
        copies.result()  # raises what a copy has raised: else the rest of the steps would count as beside copies
