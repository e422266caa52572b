"""The CPU arena beside glibc, jemalloc and tcmalloc: peak of resident memory, page faults, time, bits.

A process a run, 50 steps each. What jemalloc and tcmalloc do is had by LD_PRELOAD, without a line of code: where one of
them is better, it is the better advice. "scope" is a budget that keeps everything, the arena's own surroundings.
Page faults and times are medians of the steps after the tenth; times are those of the training thread's processor.
"""

from __future__ import annotations

import ctypes.util
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.arena_worker import MODELS
from benchmarks.launch import WorkerError, run_module
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

VARYING_LIMIT = 1.02
# name: (mode, library to preload, arguments)
CASES: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "glibc": ("plain", None, ()),
    "glibc, scope": ("scope", None, ()),
    "arena": ("arena", None, ()),
    "jemalloc": ("plain", "jemalloc", ()),
    "tcmalloc": ("plain", "tcmalloc", ()),
    "glibc, varying batch": ("plain", None, ("--varying",)),
    "arena, varying batch": ("arena", None, ("--varying",)),
    "tcmalloc, varying batch": ("plain", "tcmalloc", ("--varying",)),
    "glibc, second thread": ("plain", None, ("--second-thread",)),
    "arena, second thread": ("arena", None, ("--second-thread",)),
}
LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--subjects", nargs="+", choices=MODELS, default=list(MODELS), help="models (not --models)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)


def run(options: argparse.Namespace) -> Outcome:
    """Run every case for each model."""
    outcome = Outcome()
    num_steps = 8 if options.quick else options.steps
    for model in options.subjects:
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
    mode, library, arguments = CASES[case]
    variables = {}
    if library is not None:
        found = find(library)
        if found is None:
            outcome.check(f"{model}, {case}", "not installed", passed=False, required=False)
            return None
        variables["LD_PRELOAD"] = found
    words = ["--model", model, "--mode", mode, "--steps", num_steps, *arguments]
    try:
        record = run_module(
            "arena_worker", *words, threads=options.threads, timeout_s=options.timeout, variables=variables
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
