"""Runs the tables that were asked for, adds them to what is there already, and keeps every figure.

All eight cases take hours, so they may be run one at a time: rows of a case that was run before are replaced, and a
planner that it had not is added to its rows. `--fresh` forgets what is there. Runs side by side write files of their
own (`--tag`), which `--join` then brings together.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

from benchmarks.outcome import Outcome
from benchmarks.papers import tables
from benchmarks.papers.report import TIMED, report
from benchmarks.papers.subjects import CASES, profile
from benchmarks.results import RESULTS, commit
from torchdelta.planners import names

if TYPE_CHECKING:
    import argparse

    from benchmarks.papers.subjects import Case

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
TABLES = ("overheads", "proofs", "floors", "batches", "autoswap", "times")
OURS = (f"{tables.OURS}:best", f"{tables.OURS}:fast", f"{tables.OURS}/extended:best")
LEAST = f"{tables.OURS}/all:fast"
"""Looked at by its least budgets, beside ours and AutoSwap's; by its overheads where `--planners` names it."""

OTHERS = (
    "swap-all",
    "checkpoint",
    "dtr",
    "delta-2022",
    "delta-2022-released",
    "delta-2024",
    "autoswap-swdoa",
    "capuchin",
    "mu-two",
)
AUTOSWAP_MODELS = {"vgg16": 100, "resnet50": 100, "alexnet": 100}
AUTOSWAP_MACHINES = ("t4", "v100-32g")
_TIMED_SHARES = (0.4, 0.2)
"""Budgets whose planning is timed: at the second ResNet-50 is annealed."""

_KEYS = {
    "overheads": ("case", "share"),
    "floors": ("case",),
    "batches": ("case",),
    "autoswap": ("model", "machine"),
    "times": ("case", "effort", "share"),
}
"""What tells the rows of each table apart."""

Rows = dict[str, list[dict[str, Any]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    ours = OURS if tables.OURS in names() else ()
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="budgets, of the plain peak")
    parser.add_argument(
        "--planners",
        nargs="+",
        default=[*ours, *OTHERS],
        help="names; '/extended', '/persistent' or '/all' and ':fast' or ':best' after them",
    )
    parser.add_argument("--effort", choices=("fast", "best"), default="fast", help="of the largest batches")
    parser.add_argument("--by-kind", action="store_true", help="on the catalog's machines, as `torchdelta fit` prices")
    parser.add_argument("--no-bound", action="store_true", help="leave the linear program out")
    parser.add_argument(
        "--join", nargs="+", default=[], metavar="TAG", help="run nothing, join the files of these runs"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")


def run(options: argparse.Namespace) -> Outcome:
    """Fill the tables asked for."""
    outcome = Outcome()
    if options.quick:
        options.cases, options.shares = options.cases[:1], [0.6, 0.4]
    fill = {"overheads": _overheads, "floors": _floors, "batches": _batches, "autoswap": _autoswap, "times": _times}
    wanted = () if options.join else [name for name in TABLES if name in options.tables]
    found: Rows = {name: fill[name](options) for name in wanted if name != "proofs"}
    if wanted:
        found["runs"] = [{"commit": commit(), "options": _asked_for(options)}]
    name = options.name + ("-quick" if options.quick else "") + (f"-{options.tag}" if options.tag else "")
    parts = [_kept(f"{options.name}-{tag}") for tag in options.join]
    before = {} if options.no_write or options.fresh else _kept(name)
    for part in (*parts, found):
        before = merged(before, part)
    if "proofs" in wanted:
        before = merged(before, {"overheads": _proofs(before.get("overheads", []), options)})
    outcome.data.update(before)
    text = report(outcome, outcome.data)
    if not options.no_write:
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    return outcome


def _kept(name: str) -> Rows:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["data"] if path.exists() else {}


def merged(before: Rows, found: Rows) -> Rows:
    """Return the rows of both, in the order of the cases; where both have one, the new one and the old planners."""
    order = {case: place for place, case in enumerate(CASES)}
    result: Rows = {}
    for table, keys in _KEYS.items():
        rows = {tuple(row[key] for key in keys): row for row in before.get(table, ())}
        for row in found.get(table, ()):
            key = tuple(row[name] for name in keys)
            old = rows.get(key, {})
            for part in ("planners", "least_budget_bytes"):
                if part in row:
                    row[part] = {**old.get(part, {}), **row[part]}
            rows[key] = {**old, **row}
        if rows:
            ordered = sorted(rows.values(), key=lambda row: (order.get(row.get("case", ""), 0), -row.get("share", 0)))
            result[table] = ordered
    runs = [*before.get("runs", ()), *found.get("runs", ())]
    return {**result, "runs": runs} if runs else result


def _asked_for(options: argparse.Namespace) -> str:
    wanted = {key: getattr(options, key) for key in ("tables", "cases", "shares", "planners")}
    words = [word for key, values in wanted.items() for word in (f"--{key}", *map(str, values))]
    return shlex.join([*words, "--effort", options.effort, *(["--by-kind"] if options.by_kind else [])])


def _case(name: str, options: argparse.Namespace) -> Case:
    return msgspec.structs.replace(CASES[name], by_kind=options.by_kind)


def _overheads(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(options.cases) * len(options.shares), file=sys.stderr, desc="budgets") as bar:
        for name in options.cases:
            shares, planners = options.shares, options.planners
            for row in tables.overheads(_case(name, options), shares, planners, with_bound=not options.no_bound):
                rows.append(row)
                bar.update()
    return rows


def _proofs(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prove more where the plan is far above the bound: whole tensors, which take minutes a cell."""
    far = [row for row in rows if row["case"] in options.cases and tables.is_far_from_bound(row)]
    return [
        {
            "case": row["case"],
            "share": row["share"],
            "whole_bound": tables.whole_bound(row, _case(row["case"], options)),
        }
        for row in tqdm(far, file=sys.stderr, desc="proofs")
    ]


def _floors(options: argparse.Namespace) -> list[dict[str, Any]]:
    planners = [planner.replace(":best", ":fast") for planner in options.planners]
    if f"{tables.OURS}:fast" in planners:
        planners.append(LEAST)
    planners = list(dict.fromkeys(planners))
    return [
        tables.floor(_case(name, options), planners) for name in tqdm(options.cases, file=sys.stderr, desc="floors")
    ]


def _batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = tqdm(options.cases, file=sys.stderr, desc="batches")
    return [tables.batches(_case(name, options), options.effort) for name in cases]


def _autoswap(options: argparse.Namespace) -> list[dict[str, Any]]:
    wanted = [(model, size, machine) for machine in AUTOSWAP_MACHINES for model, size in AUTOSWAP_MODELS.items()]
    return [
        tables.autoswap(model, profile(machine, by_kind=options.by_kind), size)
        for model, size, machine in tqdm(wanted[:1] if options.quick else wanted, file=sys.stderr, desc="autoswap")
    ]


def _times(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        tables.planning_time(_case(name, options), effort, share, rounds=1 if effort == "best" else 3)
        for name in TIMED
        if name in options.cases
        for share in _TIMED_SHARES
        for effort in ("fast", "best")
    ]
