"""No growth from step 20 to step 200: tensor bytes, Python objects by type, open files, threads, resident memory.

A plain run goes along as control: what grows there is no fault of the runtime, and what the counting itself leaves
behind shows there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.launch import WorkerError, run_module, run_worker
from benchmarks.outcome import Outcome

if TYPE_CHECKING:
    import argparse

# AdamW's states make the least budget of so small a model large.
SHARE = 0.8
RSS_TOLERANCE = 0.03
CASES: tuple[tuple[str, str | None], ...] = (
    ("default", None),
    ("recompute-only", "recompute-only"),
    ("swap-only", "swap-only"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.set_defaults(models=["tiny"])
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--last", type=int, default=200)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--plain-only", action="store_true", help="the control alone: proves the measure")


def run(options: argparse.Namespace) -> Outcome:
    """Count in a plain run and under a few policies."""
    outcome = Outcome()
    last = min(options.last, 60) if options.quick else options.last
    for model in options.models:
        common: list[object] = ["--model", model, "--first", options.first, "--last", last]
        measure(outcome, f"{model} plain (control)", common, options)
        if options.plain_only:
            continue
        plain = run_worker("--model", model, "--optimizer", "adamw", threads=options.threads)
        budget = ["--budget-bytes", int(options.share * plain["scope_peak_bytes"])]
        for name, policy in CASES:
            policy_arguments = [] if policy is None else ["--policy", policy]
            measure(outcome, f"{model} {name}", [*common, *budget, *policy_arguments], options)
    return outcome


def measure(outcome: Outcome, label: str, arguments: list[object], options: argparse.Namespace) -> None:
    """Run one case and compare its two counts."""
    try:
        counts = run_module("long_run", *arguments, threads=options.threads, timeout_s=options.timeout)
    except WorkerError as error:
        outcome.check(label, str(error), passed=False)
        return
    outcome.data[label] = counts
    first, last = counts["first"], counts["last"]
    equal = ["live_bytes", "num_objects", "num_files", "num_threads"]
    equal += [key for key in ("step_peak_bytes", "step_kept_bytes") if key in first]
    for key in equal:
        detail = f"{first[key]} then {last[key]}"
        if key == "num_objects" and first[key] != last[key]:
            detail += f" ({describe_types(first['types'], last['types'])})"
        # Who leaves hangs on measured op times, so a step's own peak may differ a little: stated, not promised.
        required = not key.startswith("step_")
        outcome.check(f"{label}: {key}", detail, passed=first[key] == last[key], required=required)
    change = last["rss_bytes"] / first["rss_bytes"] - 1
    outcome.check(f"{label}: rss_bytes", f"{change:+.2%}", passed=abs(change) <= RSS_TOLERANCE)


def describe_types(first: dict[str, int], last: dict[str, int]) -> str:
    """Name the types whose number changed, the largest change first."""
    changes: dict[str, Any] = {name: last.get(name, 0) - first.get(name, 0) for name in {*first, *last}}
    changed = sorted((name for name in changes if changes[name]), key=lambda name: -abs(changes[name]))
    return ", ".join(f"{name} {changes[name]:+d}" for name in changed[:8])
