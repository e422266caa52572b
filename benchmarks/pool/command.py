"""Measures the pool's solvers."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.outcome import Outcome, format_table
from benchmarks.papers.subjects import CASES
from benchmarks.pool import plans, subjects
from tests.pool.instances import guillotine
from torchdelta.pool.csv_file import capacity_in_name, read_instance
from torchdelta.pool.lives import lives_of_trace
from torchdelta.pool.online import reserve_like_torch
from torchdelta.pool.solvers import SOLVERS, solve
from torchdelta.pool.validate import check

if TYPE_CHECKING:
    import argparse

    from torchdelta.pool.model import Instance

QUICK = ("gpt2, 6 layers", "resnet-50", "recurrence, 100 steps")
CUT_INTO = (200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
CUT_TIME_LIMIT_S = 20.0
PARTS = ("steps", "rectangles", "public", "plans")
ALIGNMENT_BYTES = 64  # of torch's CPU allocator
MOST_FRAGMENTATION = 0.001
MOST_FAST_FRAGMENTATION = 0.01
CAPACITY_TIME_S = 9.7  # google/minimalloc on a machine like the reference's, all six


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--data", type=Path, help="directory of google/minimalloc's challenging instances")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="of the part 'plans'")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Outcome:
    """Place everything with every solver."""
    outcome = Outcome()
    _warm()
    if "steps" in options.parts:
        _steps(outcome, options)
    if "rectangles" in options.parts:
        _rectangles(outcome, options)
    if "public" in options.parts and options.data is not None:
        _public(outcome, options)
    if "plans" in options.parts:
        _plans(outcome, options)
    return outcome


def _warm() -> None:
    """Compile before the clock runs."""
    instance, _ = guillotine(60, 0)
    for solver in SOLVERS:
        solve(instance, solver)


def _placed(instance: Instance, solver: str, options: argparse.Namespace, **limits: float) -> dict[str, Any]:
    placement = solve(instance, solver, seed=options.seed, **limits)
    check(instance, placement.offsets_bytes)
    return {
        "footprint_bytes": placement.footprint_bytes,
        "fragmentation": placement.fragmentation,
        "proved_optimal": placement.proved_optimal,
        "lower_bound_bytes": placement.lower_bound_bytes,
        "time_s": placement.time_s,
    }


def _steps(outcome: Outcome, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for name in QUICK if options.quick else subjects.SUBJECTS:
        trace = subjects.record(name)
        instance = lives_of_trace(trace, alignment_bytes=ALIGNMENT_BYTES)
        pools = {solver: _placed(instance, solver, options) for solver in SOLVERS}
        bound = max(pool["lower_bound_bytes"] for pool in pools.values())
        reserved = reserve_like_torch(instance.starts, instance.ends, instance.sizes_bytes)
        pools["torch-caching"] = {"footprint_bytes": reserved, "fragmentation": reserved / bound - 1}
        if (peer := _omnimalloc(instance)) is not None:
            pools["omnimalloc"] = peer
            if "footprint_bytes" in peer:
                peer["fragmentation"] = peer["footprint_bytes"] / bound - 1
        rows.append({"name": name, "num_lives": len(instance), "num_buffers": len(trace.buffers), "pools": pools})
        print(f"    {name}: {len(instance)} lives, {pools['torchdelta']['time_s']:.2f} s", flush=True)
    outcome.data["steps"] = rows
    names = list(rows[0]["pools"])
    print(
        format_table(
            ["step", "lives", *names],
            [
                [row["name"], str(row["num_lives"]), *(_share(row["pools"].get(pool, {})) for pool in names)]
                for row in rows
            ],
        )
    )
    ours = [row["pools"]["torchdelta"] for row in rows]
    num_exact = sum(pool["fragmentation"] == 0 for pool in ours)
    outcome.check(
        "fragmentation exactly 0", f"{num_exact} of {len(rows)} steps", passed=num_exact >= min(18, len(rows) - 2)
    )
    worst = max(pool["fragmentation"] for pool in ours)
    outcome.check("fragmentation at most 0.1 %", f"{worst:.4%}", passed=worst <= MOST_FRAGMENTATION)
    worst = max(row["pools"]["fast"]["fragmentation"] for row in rows)
    outcome.check("fast: at most 1 %", f"{worst:.3%}", passed=worst < MOST_FAST_FRAGMENTATION)
    for solver, most_lives, limit_s in (
        ("torchdelta", 20_000, 5.0),
        ("torchdelta", 100_000, 15.0),
        ("fast", 100_000, 0.5),
    ):
        times = [row["pools"][solver]["time_s"] for row in rows if row["num_lives"] <= most_lives]
        outcome.check(
            f"{solver}: up to {most_lives} lives in {limit_s} s", f"{max(times):.3f} s", passed=max(times) <= limit_s
        )
    for pool in ("torch-caching", "cnmem", "smartpool"):
        gains = [
            1 - row["pools"]["torchdelta"]["footprint_bytes"] / row["pools"][pool]["footprint_bytes"] for row in rows
        ]
        detail = f"{min(gains):.2%} to {max(gains):.2%} (the paper over CnMem: up to 13.3 %)"
        outcome.check(f"less than {pool}", detail, passed=min(gains) >= 0)


def _rectangles(outcome: Outcome, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for num_lives in CUT_INTO[:2] if options.quick else CUT_INTO:
        instance, height = guillotine(num_lives, options.seed)
        rows.append(
            {"num_lives": num_lives, "perfect_bytes": height}
            | _placed(instance, "torchdelta", options, time_limit_s=CUT_TIME_LIMIT_S)
        )
    outcome.data["rectangles"] = rows
    for row in rows:
        outcome.check(
            f"rectangle of {row['num_lives']}",
            f"{row['fragmentation']:.3%} in {row['time_s']:.2f} s",
            passed=row["fragmentation"] == 0,
            required=False,
        )


def _public(outcome: Outcome, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for path in sorted(options.data.glob("?.*.csv")):
        free = read_instance(path)
        bounded = read_instance(path, capacity_bytes=capacity_in_name(path))
        rows.append(
            {
                "name": path.name,
                "num_lives": len(free),
                "capacity_bytes": bounded.capacity_bytes,
                "within_capacity": _placed(bounded, "torchdelta", options, time_limit_s=60.0),
                "optimum": [
                    _placed(free, "torchdelta", _with_seed(options, seed), time_limit_s=60.0) for seed in range(5)
                ],
            }
        )
    outcome.data["public"] = rows
    total_s = sum(row["within_capacity"]["time_s"] for row in rows)
    fits = sum(row["within_capacity"]["footprint_bytes"] <= row["capacity_bytes"] for row in rows)
    outcome.check(
        "public instances within their capacity",
        f"{fits} of {len(rows)} in {total_s:.2f} s together",
        passed=fits == len(rows) and total_s <= CAPACITY_TIME_S,
    )
    proved = sum(all(each["proved_optimal"] for each in row["optimum"]) for row in rows)
    slowest_s = max(each["time_s"] for row in rows for each in row["optimum"])
    outcome.check(
        "proved optimal without the capacity",
        f"{proved} of {len(rows)} with each of five seeds, {slowest_s:.2f} s at most",
        passed=proved == len(rows),
    )


def _plans(outcome: Outcome, options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    cases, shares = (options.cases[:1], (0.5,)) if options.quick else (options.cases, plans.SHARES)
    for row in plans.pooled_plans(cases, shares):
        rows.append(row)
        figures = {
            name: row[name] for name in ("num_lives", "fragmentation_at_98", "num_tries", "time_s") if name in row
        }
        print(f"    {row['case']} at {row['share']:.0%}: {figures or row['why']}", flush=True)
    outcome.data["plans"] = rows
    feasible = [row for row in rows if row["feasible"]]
    fits = sum(row["fits"] for row in feasible)
    first = sum(row.get("class") == plans.CLASSES[0] for row in feasible)
    outcome.check(
        "plans: footprint within the budget",
        f"{fits} of {len(feasible)} that have a plan at {plans.FEASIBLE_SHARE:.0%} of it, "
        f"{first} in the class {plans.CLASSES[0]!r}",
        passed=fits == len(feasible) > 0,
    )


def _with_seed(options: argparse.Namespace, seed: int) -> argparse.Namespace:
    return type(options)(**(vars(options) | {"seed": seed}))


def _share(pool: dict[str, Any]) -> str:
    return f"{pool['fragmentation']:.3%}" if "fragmentation" in pool else "-"


def _omnimalloc(instance: Instance) -> dict[str, Any] | None:
    """Place with the nearest peer, where it is installed."""
    if importlib.util.find_spec("omnimalloc") is None:
        return None
    import omnimalloc  # pyright: ignore[reportMissingImports] - installed for this benchmark only

    start_s = time.perf_counter()
    sizes = instance.padded_bytes
    allocations = tuple(
        omnimalloc.Allocation(
            id=life, size=int(sizes[life]), start=int(instance.starts[life]), end=int(instance.ends[life])
        )
        for life in instance.is_placed.nonzero()[0].tolist()
    )
    try:
        placed = omnimalloc.allocate(allocations, "omni")
    except RuntimeError as error:  # it refuses large instances of long lives
        return {"error": str(error)}
    footprint = max(allocation.offset + allocation.size for allocation in placed)
    return {"footprint_bytes": int(footprint), "time_s": time.perf_counter() - start_s}
