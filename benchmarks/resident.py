"""What a process on CPU takes beyond its tensors: with glibc's heap, and with the caching allocator of a budget.

A budget counts tensors. The C library's heap keeps pages after the tensors on them were freed, so a process can hold
much more than its tensors. `Config(caching_allocator=True)`, the default, uses the pages of freed blocks again. The
other way is a variable of glibc: blocks from `MALLOC_MMAP_THRESHOLD_` bytes on come from the system one by one, and go
back to it when they are freed.

Each case is a process of its own, in turns. *Beyond* is the peak of resident memory, less what the process took after
it had imported everything and trained a tiny model, less the peak of its tensors: negative where pages of the tiny
model were used again. What the process that plans takes stands beside it.
"""

from __future__ import annotations

import contextlib
import random
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.disk import measure_disk
from benchmarks.held import resident_bytes
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

BATCH_SIZES = {"gpt2-like": 8, "resnet50": 16}
BUDGET_SHARE = 0.5
THRESHOLD_BYTES = 2**20
NUM_STEPS = 8
NUM_TIMED = 4  # the last ones
PLAIN, BUDGET = "plain", "budget"
HEAP, MAPS, CACHING = "glibc", "glibc with the variable", "caching allocator"
CASES = ((PLAIN, HEAP), (PLAIN, MAPS), (BUDGET, HEAP), (BUDGET, MAPS), (BUDGET, CACHING))
BEYOND_SHARE = 0.25  # of the budget, with the caching allocator
UNLIMITED_BYTES = 2**40
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-share", type=float, default=BUDGET_SHARE, help="of the plain peak at the allocator")


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model in all cases."""
    outcome = Outcome(disk=measure_disk())
    chosen = [name for name in options.models if name in BATCH_SIZES]
    if options.quick:
        options.rounds, chosen = 1, chosen[:1]
    rows = [row for name in chosen for row in _measure(outcome, name, options)]
    print("\n" + format_table(["model", "case", "tensors MiB", "beyond MiB", "planning MiB", "time / plain"], rows))
    return outcome


def _measure(outcome: Outcome, model: str, options: argparse.Namespace) -> list[list[str]]:
    batch_size = BATCH_SIZES[model]
    common: dict[str, Any] = {
        "threads": options.threads,
        "timeout_s": options.timeout,
        "model": model,
        "batch_size": batch_size,
    }
    plain_bytes = run_worker("resident:train", budget_bytes=UNLIMITED_BYTES, **common)["peak_bytes"]
    budget_bytes = int(options.budget_share * plain_bytes)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        found: dict[str, dict[str, Any]] = {}
        for who, heap in random.sample(CASES, len(CASES)):
            found[f"{who}, {heap}"] = run_worker(
                "resident:train",
                budget_bytes=budget_bytes if who == BUDGET else None,
                caching_allocator=heap == CACHING,
                variables={"MALLOC_MMAP_THRESHOLD_": str(THRESHOLD_BYTES)} if heap == MAPS else {},
                **common,
            )
        rounds.append(found)
    outcome.data[model] = {
        "batch_size": batch_size,
        "plain_peak_bytes": plain_bytes,
        "budget_bytes": budget_bytes,
        "rounds": rounds,
    }
    return [_judge(outcome, model, f"{who}, {heap}", budget_bytes, plain_bytes) for who, heap in CASES]


def _judge(outcome: Outcome, model: str, case: str, budget_bytes: int, plain_bytes: int) -> list[str]:
    """Add a case's figures, and return its row of the table."""
    rounds = outcome.data[model]["rounds"]
    runs = [found[case] for found in rounds]
    peak_bytes = max(record["peak_bytes"] or plain_bytes for record in runs)
    beyond_bytes = max(
        record["rss_peak_bytes"] - record["libraries_bytes"] - (record["peak_bytes"] or plain_bytes) for record in runs
    )
    planning_bytes = max(record["children_peak_bytes"] for record in runs)
    ratio = statistics.median(found[case]["time_s"] / found[f"{PLAIN}, {HEAP}"]["time_s"] for found in rounds)
    summary = {"peak_bytes": peak_bytes, "beyond_bytes": beyond_bytes, "time_ratio": ratio}
    outcome.data[model].setdefault("cases", {})[case] = summary
    if case.startswith(BUDGET):
        outcome.check(
            f"{model}, {case}: tensors stay within the budget",
            f"{peak_bytes / budget_bytes:.4f}",
            passed=peak_bytes <= budget_bytes,
        )
        outcome.check(
            f"{model}, {case}: at most {BEYOND_SHARE:.0%} of the budget beyond tensors",
            f"{beyond_bytes / budget_bytes:.3f}",
            passed=beyond_bytes <= BEYOND_SHARE * budget_bytes,
            required=case.endswith(CACHING),
        )
    sizes = [f"{size_bytes / MIB:.0f}" for size_bytes in (peak_bytes, beyond_bytes, planning_bytes)]
    return [model, case, *sizes, f"{ratio:.3f}"]


def train(
    model: str, batch_size: int, budget_bytes: int | None = None, *, caching_allocator: bool = True
) -> dict[str, Any]:
    """Train a model as a worker. Return what the process took, and the time of a step."""
    from torchdelta import Config, MemoryBudget

    config = Config(caching_allocator=caching_allocator)
    tiny = models.build("tiny")
    tiny.train(models.build_optimizer("sgd", tiny.model))
    libraries_bytes = resident_bytes()
    workload = models.build(model, batch_size)
    optimizer = models.build_optimizer("sgd", workload.model)
    times_s: list[float] = []
    with contextlib.nullcontext() if budget_bytes is None else MemoryBudget(budget_bytes, config) as budget:
        for _ in range(NUM_STEPS):
            began_s = time.perf_counter()
            workload.train(optimizer)
            times_s.append(time.perf_counter() - began_s)
    summary = None if budget is None else budget.summary()
    return {
        "libraries_bytes": libraries_bytes,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "children_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "peak_bytes": summary.peak_bytes if summary else None,
        "num_followed_steps": summary.follow.num_followed_steps if summary and summary.follow else 0,
        "time_s": statistics.median(times_s[-NUM_TIMED:]),
        "times_s": times_s,
    }
