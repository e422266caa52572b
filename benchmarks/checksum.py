"""What checksums cost a training step that swaps to disk, most of its saved bytes each step.

One process, steps in turns: with and without, in an order drawn anew each round, and the ratio of each pair. The copies
run on threads of their own: with one intra-op thread there may be a core to hide a checksum on, with as many as cores
there is none. Beside the wall time stands the process's own processor time, which other jobs on the machine disturb
less, and which is what a checksum costs where nothing hides it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks import models
from benchmarks.disk import measure_disk
from benchmarks.intervals import median_interval
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

    from benchmarks.models import Workload

# Checksums are on by default while they cost less than this share of a step.
LIMIT_SHARE = 0.02
STEPS_PER_BLOCK = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.set_defaults(models=["gpt2-like"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--all-threads", type=int, nargs="+", default=[1, 2], help="intra-op threads to measure with")


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model with each number of threads."""
    outcome = Outcome()
    num_rounds = 3 if options.quick else options.rounds
    rows: list[list[str]] = []
    outcome.disk = measure_disk()
    for name in options.models:
        workload = models.build(name)
        for num_threads in options.all_threads:
            torch.set_num_threads(num_threads)
            rounds = measure(workload, num_rounds)
            data = outcome.data[f"{name}, {num_threads} threads"] = {"rounds": rounds}
            texts: list[str] = []
            for key in ("time_s", "cpu_time_s"):
                ratio = median_interval([with_sum[key] / without[key] for with_sum, without in rounds])
                data[f"{key}_ratio"] = asdict(ratio)
                texts.append(str(ratio))
                outcome.check(
                    f"{name}, {num_threads} threads: checksums cost less than {LIMIT_SHARE:.0%} of a step's {key}",
                    str(ratio),
                    passed=ratio.median < 1 + LIMIT_SHARE,
                    required=False,
                )
            step_s = statistics.median(without["time_s"] for _, without in rounds)
            swapped_bytes = rounds[0][1]["swapped_bytes"]
            rows.append([name, str(num_threads), f"{step_s:.3f}", f"{swapped_bytes / 2**20:.0f}", *texts])
    print(format_table(["model", "threads", "step s", "swapped MiB", "wall with / without", "processor"], rows))
    return outcome


def measure(workload: Workload, num_rounds: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return the median steps of each round, with checksums and without."""
    generator = random.Random(0)
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(num_rounds + 1):
        blocks = {checksum: block(workload, checksum=checksum) for checksum in generator.sample((True, False), 2)}
        if number:  # the first round touches pages and file blocks for the first time
            rounds.append((blocks[True], blocks[False]))
    return rounds


def block(workload: Workload, *, checksum: bool) -> dict[str, float]:
    """Run a few steps that swap whatever is saved; return the medians of those after the first."""
    from torchdelta import Config, MemoryBudget

    times_s: list[float] = []
    cpu_times_s: list[float] = []
    with MemoryBudget("1TiB", Config(decisions="swap", checksum=checksum)) as budget:
        for _ in range(STEPS_PER_BLOCK):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            workload.loss().backward()
            workload.model.zero_grad()
            times_s.append(time.perf_counter() - start_s)
            cpu_times_s.append(time.process_time() - start_cpu_s)
    gc.collect()
    return {
        "time_s": statistics.median(times_s[1:]),
        "cpu_time_s": statistics.median(cpu_times_s[1:]),
        "swapped_bytes": budget.summary().swapped_out_bytes // STEPS_PER_BLOCK,
    }
