"""Lays out the rows as Markdown tables, and states which promises they keep."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.outcome import Outcome, format_table
from benchmarks.papers import tables
from torchdelta.planners.literature.autoswap import SCORES
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]

HEAD = """# What every planner would do on the models of the papers

Simulated: op times are a roofline's and nothing ran on a GPU. Batch: the largest that plain fits; activations only
(plain SGD) in the first two tables and the last, optimizer states included in the others. "-" is: no plan found. Raw
figures and the commands that made them stand in the JSON file of the same name."""

AUTOSWAP_PUBLISHED = 0.342
TIMED = {"resnet50@a100-80g": 0.1, "gpt2_large@a100-80g": 1.0, "gpt2_xl@a100-80g": 2.0}
MULTIPLES = {"resnet50@a100-80g": 4.1, "resnet101@a100-80g": 4.5, "gpt2_large@a100-80g": 11, "gpt2_xl@a100-80g": 12}
AT_DELTA = {
    "resnet50@a100-80g": 1.08,
    "resnet101@a100-80g": 1.08,
    "gpt2_large@a100-80g": 1.125,
    "gpt2_xl@a100-80g": 1.10,
}
BEST_S = 60.0
NEAR_FLOOR = 1.3
FAST_POINTS = 1.5
EXTENDED = f"{tables.OURS}/extended"
EVERYTHING = f"{tables.OURS}/all:fast"
ROUNDING = 1e-7  # of the solver, as a share of the step
FLOOR_PRECISION = 1.01  # of the search for a least budget

_BATCH_NOTE = (
    "After the @: time a sample against plain at its largest batch; in brackets against plain that reaches the same "
    "batch by gradient accumulation, whose optimizer steps as rarely. Last: pinned host memory that the plan fills."
)
_AUTOSWAP_NOTE = """What ops take inside themselves (workspaces) is left out here: the paper counts the load of
variables. It names neither model nor machine of its 34.2 %. The V100 was tried first, and gave less; the T4, whose link
is fast beside its compute, was added after that."""


def report(outcome: Outcome, data: dict[str, list[Row]]) -> str:
    """Print every table that has rows, state its checks, and return the whole as Markdown."""
    sections = [HEAD]

    def show(title: str, *parts: str) -> None:
        sections.append("\n\n".join([f"## {title}", *parts]))
        print(f"\n{sections[-1]}\n", flush=True)

    if data.get("overheads"):
        planners = _names(row["planners"] for row in data["overheads"])
        show("Overhead in %, by budget (share of the plain peak)", _overhead_table(data["overheads"], planners))
        show("Planning a cell of that table, seconds of one core", _plan_s_table(data["overheads"], planners))
    if data.get("floors"):
        show("Least budgets found, in GiB", _floor_table(data["floors"]))
        _check_floors(outcome, data["floors"])
    if data.get("overheads"):
        least = {entry["case"]: _saved_floor(entry) for entry in data.get("floors", ())}
        _check_overheads(outcome, data["overheads"], least)
    if data.get("batches"):
        show("Largest batch (multiple of plain) at a slowdown a sample", _BATCH_NOTE, _batch_table(data["batches"]))
        _check_batches(outcome, data["batches"])
    if data.get("autoswap"):
        show("AutoSwap: reduction of the peak in % without waiting", _AUTOSWAP_NOTE, _autoswap_table(data["autoswap"]))
        _check_autoswap(outcome, data["autoswap"])
    if data.get("times"):
        show("Planning, seconds of one core", _times_table(data["times"]))
        _check_times(outcome, data["times"])
    return "\n\n".join(sections) + "\n"


def _names(entries: Any) -> list[str]:
    """Return every key of some dictionaries, in the order in which they first come."""
    return list(dict.fromkeys(name for entry in entries for name in entry))


def _overhead_table(rows: Sequence[Row], planners: Sequence[str]) -> str:
    has_whole = any("whole_bound" in row for row in rows)
    body = [
        [
            row["case"],
            f"{row['share']:.0%}",
            _percent(row.get("bound", {}).get("overhead")),
            *([_percent(row["whole_bound"]["overhead"]) if "whole_bound" in row else ""] if has_whole else []),
            *(_percent(row["planners"][name].get("overhead")) if name in row["planners"] else "" for name in planners),
        ]
        for row in rows
    ]
    whole = ["bound (saved), whole"] if has_whole else []
    return format_table(["case", "budget", "bound (saved)", *whole, *planners], body)


def _plan_s_table(rows: Sequence[Row], planners: Sequence[str]) -> str:
    """Return the planning times of the cells in which a plan was found; the first cell of a process also compiles."""
    times_s = {
        name: [row["planners"][name]["plan_s"] for row in rows if "plan_s" in row["planners"].get(name, {})]
        for name in planners
    }
    body = [
        [name, str(len(found)), f"{median(found):.2f}", f"{max(found):.2f}"] for name, found in times_s.items() if found
    ]
    return format_table(["planner", "cells", "median", "most"], body)


def _floor_table(floors: Sequence[Row]) -> str:
    planners = _names(entry["least_budget_bytes"] for entry in floors)
    body = [
        [entry["case"], _gib(entry["plain_peak_bytes"]), _gib(entry["lower_bound_bytes"])]
        + [_gib(entry["least_budget_bytes"][name]) if name in entry["least_budget_bytes"] else "" for name in planners]
        for entry in floors
    ]
    return format_table(["case", "plain", "proved (saved)", *planners], body)


def _check_floors(outcome: Outcome, floors: Sequence[Row]) -> None:
    """State whether anybody needs less than the class that contains all others."""
    for entry in floors:
        found: dict[str, int] = entry["least_budget_bytes"]
        mine = found.get(EVERYTHING)
        others = [size_bytes for name, size_bytes in found.items() if name != EVERYTHING]
        if mine is not None and others:
            detail = f"{_gib(mine)} GiB, the least of all others {_gib(min(others))}"
            passed = mine <= FLOOR_PRECISION * min(others)
            outcome.check(
                f"{entry['case']}: nobody needs less than {EVERYTHING}", detail, passed=passed, required=False
            )


def _saved_floor(entry: Row) -> int:
    """Return the least budget found within the class of the bound, if that was looked for."""
    found: dict[str, int] = entry["least_budget_bytes"]
    return found.get(f"{tables.OURS}:fast", min(found.values()))


def _check_overheads(outcome: Outcome, rows: Sequence[Row], least: dict[str, int]) -> None:
    """State how far the default planner is from the bound, and whether it fits wherever anybody does."""
    gaps: list[float] = []
    for row in rows:
        mine = row["planners"].get(f"{tables.OURS}:best")
        fast = row["planners"].get(f"{tables.OURS}:fast")
        freer = row["planners"].get(f"{EXTENDED}:best")
        proved = row.get("bound", {}).get("overhead")
        if proved is not None:
            proved = max(proved, row.get("whole_bound", {}).get("overhead", 0.0))
        where = f"{row['case']} at {row['share']:.0%}"
        if mine is None:
            continue
        anyone = any(entry["feasible"] for entry in row["planners"].values())
        ours = mine["feasible"] or bool(freer and freer["feasible"])
        outcome.check(f"{where}: feasible where any planner is", "", passed=ours or not anyone, required=False)
        if not mine["feasible"]:
            continue
        if fast is not None:
            more = 100 * (fast.get("overhead", float("inf")) - mine["overhead"])
            detail = f"{more:.2f} points"
            outcome.check(f"{where}: fast beside best", detail, passed=more <= FAST_POINTS, required=False)
        if freer is not None:
            less = 100 * (mine["overhead"] - freer.get("overhead", float("inf")))
            detail = f"{less:.2f} points less"
            outcome.check(f"{where}: extended never worse", detail, passed=less >= 0, required=False)
        if proved is None:
            continue
        outcome.check(
            f"{where}: no plan of the class beats the bound",
            f"{mine['overhead']:.4%} against {proved:.4%}",
            passed=mine["overhead"] >= proved - ROUNDING,
        )
        if row["budget_bytes"] >= NEAR_FLOOR * least.get(row["case"], 0):
            gaps.append(100 * (mine["overhead"] - proved))
            outcome.check(f"{where}: above the bound", f"{gaps[-1]:.2f} points", passed=gaps[-1] <= 1, required=False)
        else:
            detail = f"{mine['overhead']:.2%} against {proved:.2%}"
            passed = mine["overhead"] <= 1.3 * proved
            outcome.check(f"{where}: at most 1.3x the bound", detail, passed=passed, required=False)
    if gaps:
        middle, most = sorted(gaps)[len(gaps) // 2], max(gaps)
        detail = f"median {middle:.2f} and at most {most:.2f} points above the bound in {len(gaps)} cells"
        outcome.check("from 1.3x the floor on", detail, passed=middle <= 0.4 and most <= 1.0, required=False)


def _batch_table(rows: Sequence[Row]) -> str:
    columns = list(rows[0]["largest"])
    body = [
        [row["case"], row["effort"], str(row["plain_batch"])]
        + [_batch(row["largest"][column]) for column in columns]
        + [_at_delta(row.get("at_delta"))]
        for row in rows
    ]
    titles = (f"at {column}" if column != "at all" else column for column in columns)
    return format_table(["case", "effort", "plain", *titles, "at DELTA's (best)"], body)


def _check_batches(outcome: Outcome, rows: Sequence[Row]) -> None:
    for row in rows:
        reached, wanted = (row["largest"]["1.25"] or {}).get("multiple"), MULTIPLES.get(row["case"])
        if wanted is not None and reached is not None:
            detail = f"x{reached:.1f}, wanted x{wanted}"
            outcome.check(f"{row['case']}: twice DELTA's multiple", detail, passed=reached >= wanted, required=False)
        if row["case"] in AT_DELTA and "at_delta" in row:
            slowdown = row["at_delta"]["slowdown"] or float("inf")
            detail = f"{slowdown:.3f}, wanted {AT_DELTA[row['case']]}"
            passed = slowdown <= AT_DELTA[row["case"]]
            outcome.check(f"{row['case']}: slowdown at DELTA's multiple", detail, passed=passed, required=False)


def _autoswap_table(rows: Sequence[Row]) -> str:
    body = [
        [row["model"], row["machine"], str(row["batch_size"]), _gib(row["plain_peak_bytes"])]
        + [_percent(row["reduction"][score]) for score in SCORES]
        for row in rows
    ]
    return format_table(["model", "machine", "batch", "plain GiB", *SCORES], body)


def _check_autoswap(outcome: Outcome, rows: Sequence[Row]) -> None:
    for row in rows:
        score, best = max(row["reduction"].items(), key=lambda item: item[1])
        detail = f"{best:.1%} by {score}, published 34.2 % (its model and machine are not known)"
        passed = best > AUTOSWAP_PUBLISHED
        outcome.check(f"AutoSwap: {row['model']} on {row['machine']}", detail, passed=passed, required=False)


def _times_table(rows: Sequence[Row]) -> str:
    body = [
        [r["case"], r["effort"], f"{r['share']:.0%}", str(r["num_ops"]), f"{r['warm_s']:.2f}", f"{r['first_s']:.2f}"]
        for r in rows
    ]
    return format_table(["case", "effort", "budget", "ops", "warm", "first"], body)


def _check_times(outcome: Outcome, rows: Sequence[Row]) -> None:
    for row in rows:
        most_s = TIMED[row["case"]] if row["effort"] == "fast" else BEST_S
        detail = f"{row['warm_s']:.2f} s ({row['num_ops']} ops), wanted {most_s:g} s"
        name = f"{row['case']} at {row['share']:.0%}: planning, {row['effort']}"
        outcome.check(name, detail, passed=row["warm_s"] <= most_s, required=False)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _gib(size_bytes: int) -> str:
    return format_bytes(size_bytes).removesuffix(" GiB")


def _batch(entry: Row | None) -> str:
    if entry is None:
        return "-"
    multiple = "" if entry["multiple"] is None else f" (x{entry['multiple']:.1f})"
    return f"{entry['batch_size']}{multiple} @ {entry['slowdown']:.2f}{_beside(entry, 2)}"


def _at_delta(entry: Row | None) -> str:
    if entry is None or entry["slowdown"] is None:
        return "-"
    return f"x{entry['multiple']} @ {entry['slowdown']:.3f}{_beside(entry, 3)}"


def _beside(entry: Row, num_digits: int) -> str:
    """Return the slowdown against gradient accumulation and the host memory; nothing for rows measured without."""
    slowdown, host_bytes = entry.get("slowdown_accumulated"), entry.get("host_bytes")
    accumulated = "" if slowdown is None else f" ({slowdown:.{num_digits}f})"
    return accumulated if host_bytes is None else f"{accumulated}, {format_bytes(host_bytes)}"
