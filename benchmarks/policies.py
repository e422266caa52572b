"""Step times of every reactive policy against plain, and the cost of a step that fits.

One process for each model and budget, in which plain and the policies take turns (see `turns`). Checked: a step that
fits costs at most 1.02 of plain after the third one, and the default policy is never worse than the better of
recompute-only and swap-only by more than 5 %. Swap figures are only worth something beside the disk's bandwidth: it is
measured through the tier before and after each contest.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import PLAIN, median_interval, ratios
from torchdelta.config import POLICIES, Config

if TYPE_CHECKING:
    import argparse

SHARES = (0.8, 0.6, 0.5, 0.4)
DEFAULT = Config().policy
SIMPLE = ("recompute-only", "swap-only")
WORSE_TOLERANCE = 1.05
RECORD_ONLY = "record-only"
RECORD_ONLY_BOUND = 1.02
NUM_RECORDED_STEPS = 3  # later ones are not recorded, as they are known to fit
RECORD_ONLY_MODEL = "gpt2-like"
CONTEST_TIMEOUT_S = 7200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record-rounds", type=int, default=20)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--record-only", action="store_true", help="measure the cost of steps that fit alone")


def run(options: argparse.Namespace) -> Outcome:
    """Measure every model, budget and policy asked for."""
    outcome = Outcome()
    rounds, record_rounds = (2, 5) if options.quick else (options.rounds, options.record_rounds)
    shares = [0.6] if options.quick else options.shares
    rows: list[list[str]] = []
    bandwidths: list[dict[str, float]] = []
    for model in options.models:
        plain = run_worker("steps:run", threads=options.threads, model=model, num_steps=2, with_gradients=False)
        plain_peak_bytes = plain["scope_peak_bytes"]
        data: dict[str, Any] = {"plain_peak_bytes": plain_peak_bytes}
        outcome.data[model] = data
        if model == RECORD_ONLY_MODEL or options.record_only:
            data[RECORD_ONLY] = measure_record_only(outcome, model, plain_peak_bytes, record_rounds, options.threads)
        if options.record_only:
            continue
        for share in shares:
            contest = run_worker(
                "turns:run",
                threads=options.threads,
                timeout_s=CONTEST_TIMEOUT_S,
                model=model,
                contenders={PLAIN: None, **{policy: {"policy": policy} for policy in options.policies}},
                budget_bytes=int(share * plain_peak_bytes),
                num_rounds=rounds,
                with_disk=True,
            )
            data[str(share)] = contest
            bandwidths += contest["disk"]
            rows += contest_rows(f"{model} {share:.0%}", contest, options.policies)
            check_default(outcome, f"{model} {share:.0%}", contest)
    if rows:
        header = ["model, budget", "policy", "step / plain", "processor / plain", "first step", "recomputed", "swapped"]
        print("\n" + format_table([*header, "disk write, read MB/s"], rows))
    if bandwidths:
        outcome.disk = {key: min(disk[key] for disk in bandwidths) for key in bandwidths[0]}
    return outcome


def measure_record_only(
    outcome: Outcome, model: str, plain_peak_bytes: int, rounds: int, threads: int
) -> dict[str, Any]:
    """Compare a budget that never binds with plain."""
    contest = run_worker(
        "turns:run",
        threads=threads,
        timeout_s=CONTEST_TIMEOUT_S,
        model=model,
        contenders={PLAIN: None, RECORD_ONLY: {}},
        budget_bytes=4 * plain_peak_bytes,
        num_rounds=rounds,
        num_steps=NUM_RECORDED_STEPS + 4,
    )
    warm = NUM_RECORDED_STEPS
    wall = median_interval(ratios(contest["rounds"], RECORD_ONLY, num_warm_steps=warm))
    processor = median_interval(ratios(contest["rounds"], RECORD_ONLY, key="cpu_times_s", num_warm_steps=warm))
    detail = f"{wall} of plain, processor time {processor}, {wall.num_samples} rounds"
    required = model == RECORD_ONLY_MODEL
    outcome.check(f"{model}: step that fits", detail, passed=wall.median <= RECORD_ONLY_BOUND, required=required)
    return {**contest, "wall": asdict(wall), "processor": asdict(processor)}


def contest_rows(label: str, contest: dict[str, Any], policies: list[str]) -> list[list[str]]:
    """Return the table's rows for one model and budget, and add the intervals to the raw data."""
    rows = []
    contest["intervals"] = {}
    bandwidth = ", ".join(f"{min(disk[key] for disk in contest['disk']) / 1e6:.0f}" for key in contest["disk"][0])
    for policy in policies:
        samples = ratios(contest["rounds"], policy)
        if policy in contest["refused"] or not samples:
            rows.append([label, policy, "-", "-", "-", "-", "-", bandwidth])
            continue
        wall = median_interval(samples)
        processor = median_interval(ratios(contest["rounds"], policy, key="cpu_times_s"))
        first = median_interval(
            [blocks[policy]["times_s"][0] / blocks[PLAIN]["times_s"][0] for blocks in contest["rounds"]]
        )
        contest["intervals"][policy] = {"wall": asdict(wall), "processor": asdict(processor), "first": asdict(first)}
        summary = contest["summaries"][policy]
        num_steps = max(len(contest["rounds"][0][policy]["times_s"]), 1)
        moved = [f"{summary[key] / num_steps / 2**20:.0f} MiB" for key in ("recomputed_bytes", "swapped_out_bytes")]
        rows.append([label, policy, str(wall), f"{processor.median:.3f}", f"{first.median:.3f}", *moved, bandwidth])
    return rows


def check_default(outcome: Outcome, label: str, contest: dict[str, Any]) -> None:
    """Hold the default policy against the better of the two simple ones; no policy may crash."""
    for policy, message in contest["crashed"].items():
        outcome.check(f"{label}: {policy}", message, passed=False)
    medians = {
        policy: median_interval(ratios(contest["rounds"], policy)).median
        for policy in SIMPLE
        if policy not in contest["refused"] and ratios(contest["rounds"], policy)
    }
    name = f"{label}: default against the better simple policy"
    if not medians:
        print(f"    ---- {name}: both refuse the budget", flush=True)
        return
    if DEFAULT in contest["refused"]:
        outcome.check(name, f"the default refuses, {', '.join(medians)} does not", passed=False)
        return
    better = min(medians, key=lambda policy: medians[policy])
    against = median_interval(ratios(contest["rounds"], DEFAULT, better))
    outcome.check(name, f"{against} of {better}", passed=against.median <= WORSE_TOLERANCE)
