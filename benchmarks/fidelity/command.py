"""Runs the contests, compares, prints the table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

MODELS = ("gpt2-like", "bert-like", "resnet50")
PEAK_TOLERANCE = 0.02
TIME_TOLERANCE = 0.15
CONTEST_TIMEOUT_S = 7200
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=9)
    parser.set_defaults(models=list(MODELS))


def run(options: argparse.Namespace) -> Outcome:
    """Hold the simulator against every model asked for."""
    outcome = Outcome()
    rounds = 3 if options.quick else options.rounds
    rows: list[list[str]] = []
    for model in options.models:
        data = run_worker(
            "fidelity.contest:run",
            threads=options.threads,
            timeout_s=CONTEST_TIMEOUT_S,
            model=model,
            num_rounds=rounds,
        )
        outcome.data[model] = data
        rows += compare(outcome, model, data)
    header = ["model", "what", "measured", "simulated", "simulated / measured", "by the wall"]
    print("\n" + format_table(header, rows))
    rates = [outcome.data[model]["processor"] for model in outcome.data]
    # The tier is host memory; no disk takes part.
    print(
        f"memory tier {_span(rates, 'out_bytes_per_s', 1e9)} GB/s out, {_span(rates, 'in_bytes_per_s', 1e9)} GB/s in, "
        f"beside the ops {_span(rates, 'per_op_s', 1e-6)} us an op"
    )
    return outcome


def compare(outcome: Outcome, model: str, data: dict[str, Any]) -> list[list[str]]:
    """Check one model's figures. Returns its rows of the table."""
    peak_ratio = data["simulated_peak_bytes"] / data["allocator_peak_bytes"]
    detail = f"simulated {data['simulated_peak_bytes']} of {data['allocator_peak_bytes']} bytes at the allocator"
    outcome.check(f"{model}: plain peak", detail, passed=abs(peak_ratio - 1) <= PEAK_TOLERANCE)
    peaks = (f"{data[key] / _MIB:.1f} MiB" for key in ("allocator_peak_bytes", "simulated_peak_bytes"))
    rows = [[model, "plain peak", *peaks, f"{peak_ratio:.4f}", ""]]
    for name, forced in data["processor"]["forced"].items():
        ratio = forced["simulated_s"] / forced["measured_s"]
        wall = data["wall"]["forced"][name]
        wall_ratio = wall["simulated_s"] / wall["measured_s"]
        detail = f"simulated {forced['simulated_s']:.3f} s of {forced['measured_s']:.3f} s: {ratio:.3f}"
        outcome.check(f"{model}: {name}", detail, passed=abs(ratio - 1) <= TIME_TOLERANCE)
        outcome.check(
            f"{model}: {name} by the wall",
            f"simulated {wall['simulated_s']:.3f} s of {wall['measured_s']:.3f} s: {wall_ratio:.3f}",
            passed=abs(wall_ratio - 1) <= TIME_TOLERANCE,
            required=False,
        )
        measured, simulated = data["work"][name]["num_recomputed_ops"], forced["num_recomputed_ops"]
        outcome.check(f"{model}: {name}, ops run again", f"{simulated} of {measured}", passed=simulated == measured)
        times = (f"{forced[key]:.3f} s" for key in ("measured_s", "simulated_s"))
        rows.append([model, name, *times, f"{ratio:.3f}", f"{wall_ratio:.3f}"])
    return rows


def _span(rates: list[dict[str, float]], key: str, unit: float) -> str:
    return f"{statistics.median(rate[key] for rate in rates) / unit:.1f}"
