"""The CPU arena beside glibc, jemalloc and tcmalloc: peak of resident memory, page faults, time, bits.

A process a run, 50 steps each. What jemalloc and tcmalloc do is had by LD_PRELOAD, without a line of code: where one of
them is better, it is the better advice. "scope" is a budget that keeps everything, the arena's own surroundings.
Page faults and times are medians of the steps after the tenth; times are those of the training thread's processor.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import random
import resource
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.launch import WorkerError, run_worker
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SIZES = {"transformer-8": 64, "resnet50": 128}  # of a sample, by model
BATCH_SIZE = 8
VARYING = (4, 5, 6, 8)  # batches of a varying run, drawn anew each step
WARM_STEPS = 10  # not part of the medians: plans and optimizer states are made in them
VARYING_LIMIT = 1.02
# name: (mode, library to preload, options of `train`)
CASES: dict[str, tuple[str, str | None, dict[str, bool]]] = {
    "glibc": ("plain", None, {}),
    "glibc, scope": ("scope", None, {}),
    "arena": ("arena", None, {}),
    "jemalloc": ("plain", "jemalloc", {}),
    "tcmalloc": ("plain", "tcmalloc", {}),
    "glibc, varying batch": ("plain", None, {"varying": True}),
    "arena, varying batch": ("arena", None, {"varying": True}),
    "tcmalloc, varying batch": ("plain", "tcmalloc", {"varying": True}),
    "glibc, second thread": ("plain", None, {"second_thread": True}),
    "arena, second thread": ("arena", None, {"second_thread": True}),
}
LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.set_defaults(models=list(SIZES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)


def run(options: argparse.Namespace) -> Outcome:
    """Run every case for each model."""
    outcome = Outcome()
    num_steps = 8 if options.quick else options.steps
    for model in options.models:
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for case in CASES:
                record = run_case(outcome, model, case, num_steps, options)
                if record is not None:
                    runs.setdefault(case, []).append(record)
        outcome.data[model] = runs
        rows = [[case, *row_of(runs.get(case), case)] for case in CASES]
        header = [model, "peak RSS MiB", "last RSS MiB", "page faults / step", "processor ms / step", "losses"]
        print(format_table(header, rows))
        check(outcome, model, {case: each[0] for case, each in runs.items()}, runs)
    return outcome


def run_case(
    outcome: Outcome, model: str, case: str, num_steps: int, options: argparse.Namespace
) -> dict[str, Any] | None:
    """Run one case; None where its library is not installed or the run fails, which is a failed check."""
    mode, library, settings = CASES[case]
    variables = {}
    if library is not None:
        found = find(library)
        if found is None:
            outcome.check(f"{model}, {case}", "not installed", passed=False, required=False)
            return None
        variables["LD_PRELOAD"] = found
    try:
        record = run_worker(
            "arena:train",
            threads=options.threads,
            timeout_s=options.timeout,
            variables=variables,
            model=model,
            mode=mode,
            num_steps=num_steps,
            **settings,
        )
    except WorkerError as error:
        outcome.check(f"{model}, {case}", str(error), passed=False)
        return None
    if record["allocator"] != (library or "glibc"):
        outcome.check(f"{model}, {case}", f"ran on {record['allocator']}", passed=False)
        return None
    return record


def find(library: str) -> str | None:
    """Return the name under which the loader knows a library."""
    return next(filter(None, map(ctypes.util.find_library, LIBRARIES[library])), None)


def row_of(records: list[dict[str, Any]] | None, case: str) -> list[str]:
    """Lay out the medians of a case's rounds."""
    if not records:
        return ["not installed" if CASES[case][1] else "failed", "", "", "", ""]

    def median(key: str) -> float:
        return statistics.median(record[key] for record in records)

    return [
        f"{median('rss_peak_bytes') / 2**20:.0f}",
        f"{statistics.median(record['rss_bytes'][-1] for record in records) / 2**20:.0f}",
        f"{median('median_page_faults'):.0f}",
        f"{1000 * median('median_cpu_times_s'):.0f}",
        records[0]["losses_sha256"][:8],
    ]


def check(
    outcome: Outcome, model: str, first: dict[str, dict[str, Any]], runs: dict[str, list[dict[str, Any]]]
) -> None:
    """Hold the arena against what is promised."""
    peaks = {case: statistics.median(r["rss_peak_bytes"] for r in records) for case, records in runs.items()}
    times = {case: statistics.median(r["median_cpu_times_s"] for r in records) for case, records in runs.items()}
    for case, record in first.items():
        like = "glibc" if "varying" not in case else "glibc, varying batch"
        if case != like and like in first:
            same = all(r["losses_sha256"] == first[like]["losses_sha256"] for r in runs[case])
            outcome.check(f"{model}, {case}: losses", "equal to plain" if same else "DIFFER", passed=same)
        if "arena" in record:
            figures = record["arena"]
            detail = f"{figures['num_planned_steps']} of {figures['num_steps']} steps, {figures['num_plans']} plans"
            detail += f", {figures['num_clashes']} clashes, {figures['num_left_plans']} plans left"
            outcome.check(f"{model}, {case}: planned", detail, passed=figures["num_planned_steps"] > 0)
        if record["second_thread"]:
            wrong = record["second_thread"]["num_wrong"]
            detail = f"{wrong} of {record['second_thread']['num_tensors']} wrong"
            outcome.check(f"{model}, {case}: tensors of the second thread", detail, passed=not wrong)

    def compare(case: str, other: str, limit: float, *, required: bool) -> None:
        if case in peaks and other in peaks:
            ratio = peaks[case] / peaks[other]
            detail = f"{ratio:.3f}, time {times[case] / times[other]:.3f}"
            name = f"{model}: peak of '{case}' at most {limit:g} of '{other}'"
            outcome.check(name, detail, passed=ratio <= limit, required=required)

    compare("arena", "glibc", 1.0, required=True)
    for other in ("glibc, scope", "jemalloc", "tcmalloc"):
        compare("arena", other, 1.0, required=False)
    compare("arena, varying batch", "glibc, varying batch", VARYING_LIMIT, required=True)
    compare("arena, varying batch", "tcmalloc, varying batch", 1.0, required=False)
    compare("arena, second thread", "glibc, second thread", 1.0, required=True)
    if {"arena", "arena, second thread"} <= set(first):
        alone, beside = (first[case]["arena"] for case in ("arena", "arena, second thread"))
        names = ("num_planned_steps", "num_placed", "num_outside", "num_clashes", "num_plans")
        same = all(alone[name] == beside[name] for name in names)
        detail = "the same placings" if same else f"{[alone[n] for n in names]} then {[beside[n] for n in names]}"
        outcome.check(f"{model}: a second thread changes nothing", detail, passed=same)


def train(
    model: str, mode: str, num_steps: int, *, varying: bool = False, second_thread: bool = False
) -> dict[str, Any]:
    """Train in a process whose memory the kernel measures, as a worker: the mark of resident memory never falls.

    Which allocator runs is decided outside, by LD_PRELOAD, and by the mode: "plain" without the library, "scope" in a
    budget that keeps everything, "arena" the same with the arena.
    """
    torch.manual_seed(0)
    recipe = models.MODELS[model]
    network = recipe.network().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    draws = random.Random(0)
    scope: Any = contextlib.nullcontext()
    if mode != "plain":
        from torchdelta import Config, MemoryBudget

        scope = MemoryBudget("1TiB", Config(decisions="keep", arena=mode == "arena"))
    losses: list[str] = []
    resident_bytes: list[int] = []
    record: dict[str, Any] = {"times_s": [], "cpu_times_s": [], "page_faults": []}
    with another_thread(wanted=second_thread) as counts, scope:
        for _ in range(num_steps):
            faults, began_s, began_cpu_s = page_faults(), time.perf_counter(), time.thread_time()
            loss = models.loss_of(
                network, recipe.draw(draws.choice(VARYING) if varying else BATCH_SIZE, SIZES.get(model, recipe.size))
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            record["times_s"].append(time.perf_counter() - began_s)
            record["cpu_times_s"].append(time.thread_time() - began_cpu_s)
            record["page_faults"].append(page_faults() - faults)
            resident_bytes.append(status_bytes("VmRSS"))
        if mode == "arena":
            from dataclasses import asdict

            from torchdelta.native.arena import arena_status

            status = arena_status()
            record["arena"] = {"is_on": status.is_on, "reason": status.reason, **asdict(status.figures)}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    warm = min(WARM_STEPS, num_steps // 2)
    medians = {
        f"median_{name}": statistics.median(record[name][warm:]) for name in ("times_s", "cpu_times_s", "page_faults")
    }
    return {
        **record,
        **medians,
        "allocator": next((name for name in ("jemalloc", "tcmalloc") if name in maps), "glibc"),
        "losses_sha256": hashlib.sha256(" ".join(losses).encode()).hexdigest(),
        "rss_bytes": resident_bytes,
        "rss_peak_bytes": status_bytes("VmHWM"),
        "second_thread": {"num_tensors": counts[0], "num_wrong": counts[1]} if second_thread else None,
    }


@contextlib.contextmanager
def another_thread(*, wanted: bool) -> Iterator[list[int]]:
    """Allocate and free tensors of many sizes on a second thread, and check what lies in them."""
    counts = [0, 0]
    is_over = threading.Event()

    def work() -> None:
        generator = random.Random(1)
        held: list[torch.Tensor] = []
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


def page_faults() -> int:
    """Return the page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def status_bytes(field: str) -> int:
    """Return a size that the kernel states of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
