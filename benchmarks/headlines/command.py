"""Runs the cases, checks them and prints one table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.disk import measure_disk
from benchmarks.headlines.cases import CASES, CUT_SHARE, Case
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.results import RESULTS, file_name

if TYPE_CHECKING:
    import argparse

RUN_TIMEOUT_S = 3600
NUM_TIMED = 3
PARTS = ("multiples", "largest", "cut")
RUNS = ("reactive", "followed")
HEADER = (
    "model, limit",
    "batch",
    "plain's peak of limit",
    "run",
    "peak of limit",
    "same losses",
    "time per sample, of plain's largest batch",
    "of accumulation (its peak of limit)",
    "of plain at this batch, no limit",
)

Data = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    import torch

    parser.set_defaults(threads=torch.get_num_threads(), models=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=NUM_TIMED, help="timed steps of each run")


def run(options: argparse.Namespace) -> Outcome:
    """Run every case asked for."""
    outcome = Outcome(disk=measure_disk())
    rows: list[list[str]] = []
    for model in options.models:
        if model not in CASES:
            print(f"{model}: no case; there are {', '.join(CASES)}")
            continue
        began_s = time.perf_counter()
        data = outcome.data[model] = _run_case(options, outcome, CASES[model])
        for name, measured in data["measured"].items():
            rows += rows_of(model, name, measured)
        data["wall_s"] = time.perf_counter() - began_s
        print(f"    {model}: {data['wall_s']:.0f} s", flush=True)
    table = format_table(HEADER, rows)
    print("\n" + table)
    if not options.no_write:
        (RESULTS / f"{file_name('headlines', options)}.md").write_text(table + "\n", encoding="utf-8")
    return outcome


def _run_case(options: argparse.Namespace, outcome: Outcome, case: Case) -> Data:
    def work(function: str, **values: Any) -> Data:
        return run_worker(
            f"headlines.runs:{function}", threads=options.threads, timeout_s=RUN_TIMEOUT_S, model=case.model, **values
        )

    limit_bytes = work("limit", batch_size=case.plain_batch)["limit_bytes"]
    data: Data = {"limit_bytes": limit_bytes, "plain_batch": case.plain_batch, "measured": {}}
    print(f"{case.model}: plain's largest batch {case.plain_batch}, limit {limit_bytes / 2**20:.1f} MiB", flush=True)

    def measure(name: str, batch_size: int, bytes_: int) -> None:
        measured = work(
            "measure", batch_size=batch_size, limit_bytes=bytes_, plain_batch=case.plain_batch, num_timed=options.steps
        )
        data["measured"][name] = measured | {"limit_bytes": bytes_}
        check_runs(outcome, f"{case.model} {name}", data["measured"][name])

    multiples = case.multiples[:1] if options.quick else case.multiples
    if "multiples" in options.parts:
        for multiple in multiples:
            measure(f"x{multiple:g}", case.batch(multiple), limit_bytes)
    if "largest" in options.parts and not options.quick:
        start_batch = case.batch(max(case.multiples)) if "multiples" in options.parts else case.plain_batch
        trained = all("error" not in measured["reactive"] for measured in data["measured"].values())
        data["search"] = work(
            "largest", start_batch=start_batch if trained else case.plain_batch, limit_bytes=limit_bytes
        )
        batch_size = data["search"]["largest_batch"]
        detail = f"batch {batch_size}, {batch_size / case.plain_batch:.2f} times plain's"
        outcome.check(f"{case.model}: largest batch", detail, passed=batch_size > case.plain_batch)
        measure(f"largest, x{batch_size / case.plain_batch:.2f}", batch_size, limit_bytes)
    if "cut" in options.parts and not options.quick:
        peak_bytes = work("limit", batch_size=case.cut_batch)["limit_bytes"]
        measure(f"cut of {CUT_SHARE:.0%}", case.cut_batch, int((1 - CUT_SHARE) * peak_bytes))
    return data


def check_runs(outcome: Outcome, name: str, measured: Data) -> None:
    """Check the peak and the losses of both runs under the limit."""
    for run_name in RUNS:
        found = measured[run_name]
        if "error" in found:
            least_bytes = found["least_budget_bytes"]
            share = f" (least {least_bytes / measured['limit_bytes']:.3f} of the limit)" if least_bytes else ""
            outcome.check(f"{name} {run_name}: trains", found["error"] + share, passed=False)
            continue
        share = found["peak_bytes"] / measured["limit_bytes"]
        outcome.check(f"{name} {run_name}: peak", f"{share:.4f} of the limit", passed=share <= 1)
        detail = f"{found['sample_over_plain']:.2f} of plain's at its largest batch"
        outcome.check(f"{name} {run_name}: time per sample", detail, passed=True, required=False)
        detail = f"{found['num_steps']} steps, batch {measured['batch_size']}"
        outcome.check(f"{name} {run_name}: plain's losses, bit for bit", detail, passed=found["same_losses"])


def rows_of(model: str, name: str, measured: Data) -> list[list[str]]:
    """Return the lines of the table: one a run."""
    limit_bytes = measured["limit_bytes"]
    rows: list[list[str]] = []
    for run_name in RUNS:
        found = measured[run_name]
        cells = [
            f"{model}, {limit_bytes / 2**20:.0f} MiB",
            f"{measured['batch_size']}, {name}",
            f"{measured['plain_peak_bytes'] / limit_bytes:.2f}",
            run_name,
        ]
        if "error" in found:
            rows.append([*cells, "does not train" if found["least_budget_bytes"] else "no plan", *["-"] * 4])
            continue
        accumulated = measured.get("accumulated")
        beside = "-"
        if accumulated is not None:
            ratio = found["sample_over_plain"] / accumulated["sample_over_plain"]
            beside = f"{ratio:.3f} ({accumulated['peak_bytes'] / limit_bytes:.2f})"
        rows.append(
            [
                *cells,
                f"{found['peak_bytes'] / limit_bytes:.4f}",
                "yes" if found["same_losses"] else "NO",
                f"{found['sample_over_plain']:.3f}",
                beside,
                f"{found['sample_over_plain'] / measured['plain']['sample_over_plain']:.3f}",
            ]
        )
    return rows
