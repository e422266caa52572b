"""Check the library for races: `python -m tests.racecheck --help`.

The whole check takes some two hours, most of them for every schedule of six swaps; `make test` and `make test-rest`
run shares of it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from tests.racecheck import controls, mutants
from tests.racecheck.explore import explore, swap_tensors
from tests.racecheck.hunts import KNOWN, hunt
from tests.racecheck.paths import Bench
from tests.racecheck.schedules import ALL_PATHS, play
from tests.racecheck.session_steps import chain

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_RUNS = 2_000_000


def check_controls(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Find every positive control in every schedule, and nothing in its mended form."""
    missed: list[str] = []
    for control in controls.CONTROLS:
        for seed in range(arguments.seeds):
            verdict = controls.judge(bench, control, seed)
            if not verdict.found:
                missed.append(f"{control.__name__}, seed {seed}: not found")
            missed += [f"{control.__name__}, seed {seed}, mended: {one}" for one in verdict.found_mended]
    return {"num_controls": len(controls.CONTROLS), "num_seeds": arguments.seeds, "found": missed}


def check_schedules(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Play random schedules on every path in turn."""
    found: list[str] = []
    num_kernels, num_unfit = 0, 0
    by_path: collections.Counter[str] = collections.Counter()
    for number, path in zip(range(arguments.schedules), itertools.cycle(ALL_PATHS), strict=False):
        seed = arguments.first_seed + number // len(ALL_PATHS)
        shown = play(bench, path, seed)
        by_path["/".join(path)] += 1
        num_kernels += shown.num_kernels
        num_unfit += not shown.has_fitted
        found += [f"{'/'.join(path)}, seed {seed}: {one}" for one in shown.found]
        if number % 500 == 499:
            print(f"{number + 1} schedules, {len(found)} found", file=sys.stderr, flush=True)
    return {
        "num_schedules": arguments.schedules,
        "num_paths": len(ALL_PATHS),
        "num_kernels": num_kernels,
        "num_without_room": num_unfit,
        "found": found,
    }


def check_all_schedules(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every schedule of small steps."""
    found: list[str] = []
    steps: dict[str, Any] = {}
    programs: list[tuple[str, Any]] = []
    for num_tensors in range(1, arguments.tensors + 1):
        programs += [
            (f"tier, {num_tensors} tensors, {depth} at a time", swap_tensors(num_tensors, depth)) for depth in (1, 2)
        ]
        programs.append((f"session, {num_tensors} swapped", chain("s" * num_tensors)))
    for num_tensors in range(1, arguments.mixed_tensors + 1):
        programs += [
            (f"session, {''.join(decisions)}", chain("".join(decisions)))
            for decisions in itertools.product("srk", repeat=num_tensors)
        ]
    first_answers = [int(answer) for answer in arguments.first_answers]
    for name, program in programs:
        if arguments.steps not in name:
            continue
        began_s = time.perf_counter()
        explored = explore(bench, program, most_runs=MOST_RUNS, first_answers=first_answers)
        steps[name] = {
            "num_schedules": explored.num_runs,
            "num_pruned": explored.num_pruned,
            "num_call_sequences": explored.num_logs,
            "is_complete": explored.is_complete,
            "time_s": round(time.perf_counter() - began_s, 1),
        }
        print(f"{name}: {explored.num_runs} schedules, {len(explored.found)} found", file=sys.stderr, flush=True)
        found += [f"{name}: {one}" for one in explored.found]
        if not explored.is_complete:
            found.append(f"{name}: stopped after {explored.num_runs} schedules")
    return {"steps": steps, "found": found}


def check_mutants(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove each wait of the tiers in turn, and find it."""
    caught: dict[str, str] = {}
    found: list[str] = []
    for mutant in mutants.find_mutants():
        how = hunt(bench, mutant, most_seeds=arguments.mutant_seeds)
        caught[mutant.name] = how or KNOWN.get(mutant.name, "not found")
        print(f"{mutant.name} ({mutant.line}): {caught[mutant.name]}", file=sys.stderr, flush=True)
        if how is None and mutant.name not in KNOWN:
            found.append(f"{mutant.name}: the removed wait {mutant.line} is not found")
    return {"num_mutants": len(caught), "mutants": caught, "found": found}


CHECKS: dict[str, Callable[[Bench, argparse.Namespace], dict[str, Any]]] = {
    "controls": check_controls,
    "schedules": check_schedules,
    "exhaustive": check_all_schedules,
    "mutants": check_mutants,
}


def main() -> int:
    """Run the checks that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.racecheck", description="Check the library for races.")
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many random schedules")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first of them")
    parser.add_argument("--tensors", type=int, default=6, help="exhaustive: up to so many tensors")
    parser.add_argument(
        "--mixed-tensors", type=int, default=3, help="exhaustive, every mix of decisions: up to so many"
    )
    parser.add_argument("--steps", default="", help="exhaustive: only steps with this in their name")
    parser.add_argument("--first-answers", default="", help="exhaustive: a part, such as 01, of all schedules")
    parser.add_argument("--seeds", type=int, default=50, help="schedules of each positive control")
    parser.add_argument("--mutant-seeds", type=int, default=60, help="schedules of each path for each mutant at most")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    unknown = set(arguments.checks) - set(CHECKS)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; take of {', '.join(CHECKS)}")
    if set(arguments.first_answers) - {"0", "1"}:
        parser.error(f"--first-answers are zeros and ones, not {arguments.first_answers}")
    bench = Bench()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in arguments.checks or CHECKS:
        began_s = time.perf_counter()
        results[name] = CHECKS[name](bench, arguments)
        results[name]["time_s"] = round(time.perf_counter() - began_s, 1)
    counts = bench.extension.counts()
    results["num_at_launch"] = counts["num_at_launch"]
    num_found = sum(len(results[name]["found"]) for name in arguments.checks or CHECKS)
    print(json.dumps(results, indent=2) if arguments.json else _table(results))
    return 1 if num_found else 0


def _table(results: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, result in results.items():
        if isinstance(result, dict):
            said = ", ".join(f"{key} {value}" for key, value in result.items() if isinstance(value, int | float))
            lines.append(f"{name}: {said}; {len(result['found'])} found")
            lines += [f"  {one}" for one in result["found"][:20]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
