"""Bandwidth of the swap tiers by buffer size, what a checksum costs, and what copies cost the compute beside them.

Configurations are interleaved and medians are taken, since a shared machine drifts. `disk` bypasses the page cache
where the file system allows it (`direct`); where it does not, the page cache flatters every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import results
from benchmarks.outcome import Outcome, format_table
from torchdelta.runtime.tiers.disk import DiskTier
from torchdelta.runtime.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.tiers.pooled import PooledTier

BATCH_BYTES = 256 << 20
SIZES_BYTES = (64 << 10, 1 << 20, 32 << 20)
# A checksum that costs more than this share of a transfer is not on by default.
CHECKSUM_SHARE = 0.02
OPENERS: dict[str, Callable[[], PooledTier]] = {
    "disk": DiskTier,
    "disk+checksum": lambda: DiskTier(checksum=True),
    "memory": MemoryTier,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> Outcome:
    """Measure everything, print the tables."""
    torch.set_num_threads(options.threads)
    outcome = Outcome()
    num_rounds = 2 if options.quick else options.rounds
    batch_bytes = BATCH_BYTES // 8 if options.quick else BATCH_BYTES
    tiers = {name: opener() for name, opener in OPENERS.items()}
    try:
        disk = tiers["disk"]
        outcome.data["direct"] = getattr(disk, "direct", False)
        outcome.data["start_estimates"] = [disk.write_bytes_per_s, disk.read_bytes_per_s]
        outcome.data["bandwidth"] = bandwidth = measure_bandwidth(tiers, num_rounds, batch_bytes)
        rows = [
            [
                row["tier"],
                str(row["size_bytes"]),
                *(f"{row[key] / 1e9:.2f}" for key in ("write_bytes_per_s", "read_bytes_per_s")),
            ]
            for row in bandwidth
        ]
        print(format_table(["tier", "buffer bytes", "write GB/s", "read GB/s"], rows))
        largest = next(row for row in bandwidth if (row["tier"], row["size_bytes"]) == ("disk", SIZES_BYTES[-1]))
        outcome.disk = {key: largest[key] for key in ("write_bytes_per_s", "read_bytes_per_s")}
        outcome.data["checksum"] = checksum = measure_checksum(outcome.disk, num_rounds)
        print(
            f"CRC-32: {checksum['crc32_bytes_per_s'] / 1e9:.2f} GB/s on one core: {checksum['write_share']:.0%} of the "
            f"time of a write, {checksum['read_share']:.0%} of that of a read"
        )
        outcome.data["compute"] = compute = measure_compute(tiers, num_rounds, batch_bytes)
        for name, ratio in compute.items():
            print(f"matrix products beside copies, {name}: {ratio:.3f} of their time alone")
        worst_share = max(checksum["write_share"], checksum["read_share"])
        outcome.check(
            "checksums stay off by default",
            f"they cost {worst_share:.0%} of a transfer, and the limit is {CHECKSUM_SHARE:.0%}",
            passed=worst_share > CHECKSUM_SHARE,
            required=False,
        )
    finally:
        for tier in tiers.values():
            tier.close()
    return outcome


def measure_bandwidth(tiers: dict[str, PooledTier], num_rounds: int, batch_bytes: int) -> list[dict[str, Any]]:
    """Write and read a batch of buffers of each size through each tier."""
    samples: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(num_rounds + 1):
        for size_bytes in SIZES_BYTES:
            # Small buffers measure the cost of a transfer, for which a part of the batch will do.
            num_buffers = max(1, min(batch_bytes // size_bytes, 512))
            sources = [torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).untyped_storage()] * num_buffers
            targets = [
                torch.empty(size_bytes, dtype=torch.uint8).fill_(1).untyped_storage() for _ in range(num_buffers)
            ]
            for name, tier in tiers.items():
                slots = [tier.reserve(size_bytes) for _ in range(num_buffers)]
                start_s = time.perf_counter()
                for write in [tier.write(slot, source) for slot, source in zip(slots, sources, strict=True)]:
                    write.wait()
                middle_s = time.perf_counter()
                for read in [tier.read(slot, target) for slot, target in zip(slots, targets, strict=True)]:
                    read.wait()
                end_s = time.perf_counter()
                for slot in slots:
                    tier.release(slot)
                num_bytes = size_bytes * num_buffers
                pair = (num_bytes / (middle_s - start_s), num_bytes / (end_s - middle_s))
                samples.setdefault((size_bytes, name), []).append(pair)
    return [
        {
            "tier": name,
            "size_bytes": size_bytes,
            # Without the first round, which touches pages and file blocks for the first time.
            "write_bytes_per_s": statistics.median(pair[0] for pair in pairs[1:]),
            "read_bytes_per_s": statistics.median(pair[1] for pair in pairs[1:]),
            "samples": pairs,
        }
        for (size_bytes, name), pairs in samples.items()
    ]


def measure_checksum(disk: dict[str, float], num_rounds: int) -> dict[str, float]:
    """Time the checksum alone on one core, against the time that the disk needs for the same bytes."""
    block = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8).numpy()
    times_s: list[float] = []
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        zlib.crc32(block)
        times_s.append(time.perf_counter() - start_s)
    crc32_bytes_per_s = block.nbytes / statistics.median(times_s)
    return {
        "crc32_bytes_per_s": crc32_bytes_per_s,
        "write_share": disk["write_bytes_per_s"] / crc32_bytes_per_s,
        "read_share": disk["read_bytes_per_s"] / crc32_bytes_per_s,
    }


def measure_compute(tiers: dict[str, PooledTier], num_rounds: int, batch_bytes: int) -> dict[str, float]:
    """Time matrix products with and without copies under way: what hiding a transfer costs the compute."""
    size_bytes = SIZES_BYTES[-1]
    sources = [torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).untyped_storage()] * max(
        1, batch_bytes // size_bytes
    )
    ratios: dict[str, list[float]] = {name: [] for name in tiers}
    multiply(1)
    for _ in range(num_rounds):
        for name, tier in tiers.items():
            slots = [tier.reserve(size_bytes) for _ in sources]
            start_s = time.perf_counter()
            writes = [tier.write(slot, source) for slot, source in zip(slots, sources, strict=True)]
            num_products = 0
            while not all(write.is_done() for write in writes):
                multiply(1)
                num_products += 1
            beside_s = time.perf_counter() - start_s
            for slot in slots:
                tier.release(slot)
            start_s = time.perf_counter()
            multiply(num_products)
            ratios[name].append(beside_s / (time.perf_counter() - start_s))
    return {name: statistics.median(values) for name, values in ratios.items()}


def multiply(num_products: int) -> None:
    """Keep the compute busy for some milliseconds a product."""
    left = torch.ones(512, 512)
    for _ in range(num_products):
        left = (left @ left).clamp_(max=1.0)


def main() -> int:
    """Run it alone."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small part, for trying")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument(
        "--json", action="store_true", help="print the raw figures as one JSON object on stdout, the tables on stderr"
    )
    add_arguments(parser)
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        outcome = run(options)
    if options.json:
        print(json.dumps({"disk": outcome.disk, **outcome.data}))
    if not options.no_write:
        command = " ".join(["python -m benchmarks.tiers", *sys.argv[1:]])
        path = results.write("tiers", command=command, threads=options.threads, disk=outcome.disk, data=outcome.data)
        print(f"raw figures in {path.relative_to(results.REPOSITORY)}", file=sys.stderr)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
