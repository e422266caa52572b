"""The swap tier's own bandwidth, to stand beside every figure that swapping went into.

Measured through the tier and not beside it: what matters is what the runtime gets, with its alignment, its threads and
the file system that the swap directory is on.
"""

from __future__ import annotations

import time

import torch

CHUNK_BYTES = 8 * 2**20
NUM_CHUNKS = 24


def measure_disk(num_rounds: int = 3) -> dict[str, float]:
    """Write and read `NUM_CHUNKS` buffers through a disk tier; the best of a few rounds in bytes per second."""
    from torchdelta.runtime.tiers import open_tier

    sources = [torch.empty(CHUNK_BYTES, dtype=torch.uint8).random_().untyped_storage() for _ in range(NUM_CHUNKS)]
    targets = [torch.UntypedStorage(CHUNK_BYTES) for _ in range(NUM_CHUNKS)]
    written, read = [], []
    tier = open_tier("disk")
    try:
        for _ in range(num_rounds):
            slots = [tier.reserve(CHUNK_BYTES) for _ in sources]
            began_s = time.perf_counter()
            for transfer in [tier.write(slot, source) for slot, source in zip(slots, sources, strict=True)]:
                transfer.wait()
            written.append(NUM_CHUNKS * CHUNK_BYTES / (time.perf_counter() - began_s))
            began_s = time.perf_counter()
            for transfer in [tier.read(slot, target) for slot, target in zip(slots, targets, strict=True)]:
                transfer.wait()
            read.append(NUM_CHUNKS * CHUNK_BYTES / (time.perf_counter() - began_s))
            for slot in slots:
                tier.release(slot)
    finally:
        tier.close()
    return {"write_bytes_per_s": max(written), "read_bytes_per_s": max(read)}
