"""What the memory tier carries: copies of the sizes that swap-all moves, out in their order and back in reverse."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from torchdelta.runtime.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Seconds = tuple[float, float]
"""Of the processor, all threads; of the wall."""


class Copies:
    """An open tier, and what it is to carry."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self.sizes_bytes = sizes_bytes
        self.tier = MemoryTier()
        self.run()  # touches the pool's pages for the first time, as a scope's first step does

    def run(self) -> dict[str, Seconds]:
        """Carry everything out and back once, and return the seconds of each way.

        Each copy is waited for. What has left is freed, and comes back in a fresh storage, as in a step.
        """
        storages = [torch.ones(size, dtype=torch.uint8).untyped_storage() for size in self.sizes_bytes]
        slots = [self.tier.reserve(size) for size in self.sizes_bytes]

        def out() -> None:
            for place, slot in enumerate(slots):
                self.tier.write(slot, storages[place]).wait()
                storages[place] = torch.UntypedStorage(0)

        def back() -> None:
            for place in reversed(range(len(slots))):
                storages[place] = torch.UntypedStorage(self.sizes_bytes[place])
                self.tier.read(slots[place], storages[place]).wait()
                storages[place] = torch.UntypedStorage(0)
                self.tier.release(slots[place])

        return {"out": _timed(out), "in": _timed(back)}

    def close(self) -> None:
        """Give the tier's memory back."""
        self.tier.close()


def _timed(work: Callable[[], None]) -> Seconds:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - began_cpu_s, time.perf_counter() - began_s
