"""One training run whose memory the kernel measures: `python -m benchmarks.arena_worker --model transformer-8 --json`.

A process a run: the high-water mark of resident memory never falls. Which allocator runs is decided outside, by
LD_PRELOAD, and by `--mode`: "plain" without the library, "scope" in a budget that keeps everything, "arena" the same
with the arena.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.resnet import resnet50

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

MODELS = ("transformer-8", "resnet50")
MODES = ("plain", "scope", "arena")
NUM_BLOCKS, WIDTH, NUM_HEADS, SEQUENCE = 8, 384, 6, 64
PIXELS = 128
BATCH = 8
VARYING = (4, 5, 6, 8)  # batches of a varying run, drawn anew each step
WARM_STEPS = 10  # not part of the medians: plans and optimizer states are made in them


class Transformer(nn.Module):
    """Eight blocks over token-like features, with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, NUM_BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores for every position."""
        return self.head(self.blocks(x))


def build(name: str) -> nn.Module:
    """Return the model, in train mode."""
    return (Transformer() if name == "transformer-8" else resnet50()).train()


def batch_of(name: str, size: int) -> tuple[Tensor, Tensor]:
    """Draw a batch."""
    if name == "transformer-8":
        return torch.randn(size, SEQUENCE, WIDTH), torch.randint(1000, (size, SEQUENCE))
    return torch.randn(size, 3, PIXELS, PIXELS), torch.randint(1000, (size,))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run the forward pass."""
    scores = model(batch[0])
    return nn.functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten())


def open_scope(mode: str) -> AbstractContextManager[Any]:
    """Return the budget's context, or one that does nothing."""
    if mode == "plain":
        return contextlib.nullcontext()
    from torchdelta import Config, MemoryBudget

    return MemoryBudget("1TiB", Config(decisions="keep", arena=mode == "arena"))


@contextlib.contextmanager
def another_thread(*, wanted: bool) -> Iterator[list[int]]:
    """Allocate and free tensors of many sizes on a second thread, and check what lies in them."""
    counts = [0, 0]
    is_over = threading.Event()

    def work() -> None:
        generator = random.Random(1)
        held: list[Tensor] = []
        while not is_over.wait(0.0005):
            held.append(torch.full((generator.randint(1, 200_000),), float(len(held))))
            counts[0] += 1
            if len(held) > 20:
                tensor = held.pop(generator.randrange(len(held)))
                counts[1] += not bool((tensor == tensor[0]).all())

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    yield counts
    is_over.set()
    if wanted:
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena_worker")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--varying", action="store_true")
    parser.add_argument("--second-thread", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = build(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = random.Random(0)
    record: dict[str, Any] = {"losses": [], "times_s": [], "cpu_times_s": [], "page_faults": []}
    resident = []
    with another_thread(wanted=options.second_thread) as counts, open_scope(options.mode):
        for _ in range(options.steps):
            faults, start_s, start_cpu_s = page_faults(), time.perf_counter(), time.thread_time()
            batch = batch_of(options.model, draws.choice(VARYING) if options.varying else BATCH)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record["losses"].append(loss.item().hex())
            record["times_s"].append(time.perf_counter() - start_s)
            record["cpu_times_s"].append(time.thread_time() - start_cpu_s)
            record["page_faults"].append(page_faults() - faults)
            resident.append(status_bytes("VmRSS"))
        if options.mode == "arena":
            from dataclasses import asdict

            from torchdelta.native.arena import arena_status

            status = arena_status()
            record["arena"] = {"is_on": status.is_on, "reason": status.reason, **asdict(status.figures)}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    record["allocator"] = next((name for name in ("jemalloc", "tcmalloc") if name in maps), "glibc")
    record["losses_sha256"] = hashlib.sha256(" ".join(record.pop("losses")).encode()).hexdigest()
    warm = min(WARM_STEPS, options.steps // 2)
    for name in ("times_s", "cpu_times_s", "page_faults"):
        record[f"median_{name}"] = statistics.median(record[name][warm:])
    record["rss_bytes"] = resident
    record["rss_peak_bytes"] = status_bytes("VmHWM")
    record["second_thread"] = {"num_tensors": counts[0], "num_wrong": counts[1]} if options.second_thread else None
    print(json.dumps(record))
    return 0


def page_faults() -> int:
    """Return the page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def status_bytes(field: str) -> int:
    """Return a size that the kernel states of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
