"""Runs both processes of the soak in step with each other, and judges what they say."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from benchmarks.held import describe_types
from benchmarks.launch import REPOSITORY, worker_command, worker_environment
from benchmarks.outcome import Outcome
from benchmarks.soak import schedule
from torchdelta.config import PLANNERS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

QUICK_MINUTES = 1.0
# Resident memory rises by about an eighth during the first 30 episodes, that of the plain process, too, and then stays
# where it is. In a run of so many episodes, the second quarter is mostly after that.
FEWEST_EPISODES = 80
MOST_KEPT = 20  # of what failed, in the results file
RSS_TOLERANCE = 0.03
HEAP_TOLERANCE = 0.005
OBJECTS_TOLERANCE = 0.002
# What may not grow at all.
EXACT = ("live_bytes", "num_files", "num_threads", "num_native_threads")
# The last step's loss may be alive or not; a scope's own scalars are no growth.
COUNTED_TOLERANCE_BYTES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument(
        "--minutes", type=float, default=30.0, help=f"at least, and {FEWEST_EPISODES} episodes at least"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planner", choices=PLANNERS, help="follow the plans of this planner")
    parser.add_argument(
        "--decision-class",
        choices=("saved", "all"),
        default="saved",
        help="what may leave; with all, budgets are smaller",
    )


@dataclass(kw_only=True)
class Tally:
    """What was seen so far; it does not grow with the length of the run, but for one short row an episode."""

    num_steps: int = 0
    num_known: int = 0
    num_metered: int = 0
    largest_excess_bytes: int = -(1 << 62)
    largest_first_excess_share: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    different: list[dict[str, Any]] = field(default_factory=list)
    above: list[dict[str, Any]] = field(default_factory=list)
    above_at_allocator: list[dict[str, Any]] = field(default_factory=list)
    unexpected: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    plain_episodes: list[dict[str, Any]] = field(default_factory=list)
    types: list[tuple[int, dict[str, int]]] = field(default_factory=list)


def run(options: argparse.Namespace) -> Outcome:
    """Run both processes for the time that was asked for."""
    minutes = QUICK_MINUTES if options.quick else options.minutes
    tally = Tally()
    outcome = Outcome()
    error = ""
    with _worker(options, minutes) as ours, _worker(options, minutes, plain=True) as plain:
        for record in _records(ours):
            if record["kind"] == "end":
                break
            twin = next(_records(plain), None)
            if twin is None:
                error = "the plain process ended early"
                break
            take(tally, record, twin)
        else:
            error = f"the process with the budgets ended with exit code {ours.wait()}"
    outcome.check("both processes finished", error or "yes", passed=not error)
    judge(outcome, tally)
    if options.planner:
        num_followed = sum(episode["num_followed_steps"] for episode in tally.episodes)
        num_diverged = sum(episode["num_diverged_steps"] for episode in tally.episodes)
        detail = f"{num_followed} steps were followed to their end, {num_diverged} diverged"
        outcome.check("plans were followed", detail, passed=num_followed > 0)
    return outcome


@contextlib.contextmanager
def _worker(options: argparse.Namespace, minutes: float, *, plain: bool = False) -> Iterator[subprocess.Popen[str]]:
    # The plain one is ended from here: it has no reason to stop where the other does.
    seconds = minutes * 60 * (10 if plain else 1)
    process = subprocess.Popen(
        worker_command(
            "soak.trainer:run",
            threads=options.threads,
            seed=options.seed,
            seconds=seconds,
            least_episodes=0 if options.quick else FEWEST_EPISODES,
            plain=plain,
            planner=None if plain else options.planner,
            decision_class=options.decision_class,
        ),
        cwd=REPOSITORY,
        env=worker_environment(options.threads),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _records(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    lines: IO[str] | None = process.stdout
    assert lines is not None
    while line := lines.readline():
        if line.startswith("{"):
            yield json.loads(line)


def take(tally: Tally, record: dict[str, Any], twin: dict[str, Any]) -> None:
    """Take in what both processes say of one step, or of one episode."""
    if (record["kind"], record["index"]) != (twin["kind"], twin["index"]):
        message = f"the processes are out of step: {record['kind']} {record['index']}, {twin['kind']} {twin['index']}"
        raise RuntimeError(message)
    if record["kind"] == "episode":
        _take_episode(tally, record, twin)
        return
    tally.num_steps += 1
    if record["fault"]:
        tally.faults[record["fault"]] += 1
    tally.lost.update(record["lost"])
    short = {key: record[key] for key in ("index", "fault", "lost", "peak_bytes", "budget_bytes", "metered_peak_bytes")}
    differing = sorted(
        name for name in {*record["bits"], *twin["bits"]} if record["bits"].get(name) != twin["bits"].get(name)
    )
    if differing:
        _keep(tally.different, short | {"differing": differing})
    if "unexpected" in record or "unexpected" in twin:
        _keep(tally.unexpected, short | {"ours": record.get("unexpected"), "plain": twin.get("unexpected")})
    excess_bytes = record["peak_bytes"] - record["budget_bytes"]
    if record["is_known"]:
        tally.num_known += 1
        tally.largest_excess_bytes = max(tally.largest_excess_bytes, excess_bytes)
        if excess_bytes > 0:
            _keep(tally.above, short)
    else:
        share = excess_bytes / record["budget_bytes"]
        tally.largest_first_excess_share = max(tally.largest_first_excess_share, share)
    if record["metered_peak_bytes"] is not None:
        tally.num_metered += 1
        if record["metered_peak_bytes"] > record["budget_bytes"]:
            _keep(tally.above_at_allocator, short)
    if record["num_handles"]:
        _keep(tally.left, short | {"num_handles": record["num_handles"]})


def _take_episode(tally: Tally, record: dict[str, Any], twin: dict[str, Any]) -> None:
    if record["state"] != twin["state"]:
        _keep(tally.different, {"episode": record["index"], "differing": ["state"]})
    if record["num_swap_files"]:
        _keep(tally.left, {"episode": record["index"], "num_swap_files": record["num_swap_files"]})
    if "types" in record:
        tally.types.append((record["index"], record.pop("types")))
    twin.pop("types", None)
    record.pop("state")
    tally.episodes.append(record)
    tally.plain_episodes.append({key: twin[key] for key in ("index", "num_objects", "heap_bytes", "rss_bytes", *EXACT)})


def _keep(failures: list[dict[str, Any]], failure: dict[str, Any]) -> None:
    """Remember a failure; of very many, that there were more."""
    if len(failures) < MOST_KEPT:
        failures.append(failure)
        print(f"    {failure}", flush=True)
    else:
        failures[-1]["and_more"] = failures[-1].get("and_more", 0) + 1


def judge(outcome: Outcome, tally: Tally) -> None:
    """State every promise, and whether it was kept."""
    outcome.data |= {
        "num_steps": tally.num_steps,
        "num_episodes": len(tally.episodes),
        "faults": dict(tally.faults),
        "lost_and_repeated": dict(tally.lost),
        "failures": {
            "bits": tally.different,
            "above_budget": tally.above,
            "above_budget_at_allocator": tally.above_at_allocator,
            "unexpected": tally.unexpected,
            "left": tally.left,
        },
        "episodes": tally.episodes,
        "plain_episodes": tally.plain_episodes,
    }
    steps = f"{tally.num_steps} steps, {sum(tally.faults.values())} of them with a fault"
    outcome.check("same bits", f"{len(tally.different)} differences in {steps}", passed=not tally.different)
    nearest = f"nearest {tally.largest_excess_bytes} bytes"
    outcome.check(
        "budget, by the runtime",
        f"{len(tally.above)} of {tally.num_known} steps of known shapes above it; {nearest}",
        passed=not tally.above and tally.num_known > 0,
    )
    outcome.check(
        "budget, by the profiler",
        f"{len(tally.above_at_allocator)} of {tally.num_metered} measured steps above it",
        passed=not tally.above_at_allocator and tally.num_metered > 0,
    )
    outcome.check(
        "first steps of a shape",
        f"at most {tally.largest_first_excess_share:.2%} above the budget",
        passed=tally.largest_first_excess_share <= 0,
        required=False,
    )
    outcome.check("errors", f"{len(tally.unexpected)} that nobody injected", passed=not tally.unexpected)
    outcome.check("left behind by a step", f"{len(tally.left)} times", passed=not tally.left)
    num_pressed = sum(episode["evicted_bytes"] > 0 for episode in tally.episodes)
    outcome.check(
        "budgets that pressed", f"{num_pressed} of {len(tally.episodes)}", passed=num_pressed > len(tally.episodes) // 2
    )
    missing = sorted({*schedule.SHARED_FAULTS, *schedule.OWN_FAULTS} - tally.faults.keys())
    outcome.check(
        "every fault was suffered",
        ", ".join(f"{name} {count}" for name, count in sorted(tally.faults.items())),
        passed=not missing,
        required=tally.num_steps > 500,
    )
    _judge_growth(outcome, tally)


def _judge_growth(outcome: Outcome, tally: Tally) -> None:
    """Compare the second quarter of the episodes with the last one; the first may fill caches."""
    quarter = len(tally.episodes) // 4
    # A model that is met later makes its optimizer's states then.
    if {episode["model"] for episode in tally.episodes[:quarter]} < set(schedule.MODELS):
        outcome.check("growth", f"{len(tally.episodes)} episodes are too few to tell", passed=False, required=False)
        return
    early, late = tally.episodes[quarter : 2 * quarter], tally.episodes[-quarter:]
    for key in EXACT:
        before, after = (sorted({episode[key] for episode in part}) for part in (early, late))
        outcome.check(f"growth: {key}", f"{before} then {after}", passed=max(after) <= max(before))
    tolerances = {"num_objects": OBJECTS_TOLERANCE, "heap_bytes": HEAP_TOLERANCE, "rss_bytes": RSS_TOLERANCE}
    for key, tolerance in tolerances.items():
        before, after = (statistics.median(episode[key] for episode in part) for part in (early, late))
        plain = [
            statistics.median(episode[key] for episode in part)
            for part in (tally.plain_episodes[quarter : 2 * quarter], tally.plain_episodes[-quarter:])
        ]
        if not before or not plain[0]:
            outcome.check(f"growth: {key}", "not known here", passed=False, required=False)
            continue
        detail = f"{before:.0f} then {after:.0f} ({after / before - 1:+.2%}; plain {plain[1] / plain[0] - 1:+.2%})"
        if key == "num_objects" and after != before:
            first = next(types for index, types in tally.types if index >= quarter)
            detail += f": {describe_types(first, tally.types[-1][1])}"
        # The counting itself leaves a little behind: the plain process shows how much.
        own = max(1.0, plain[1] / plain[0])
        outcome.check(f"growth: {key}", detail, passed=after <= before * (own + tolerance))
