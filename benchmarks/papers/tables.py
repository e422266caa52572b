"""What stands in each table, cell by cell."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from benchmarks.papers.no_overhead import reduction
from benchmarks.papers.proof.bound import nested_bound
from benchmarks.papers.subjects import Case, largest_plain_batch, step
from torchdelta.bounds.lp_bound import bound, least_peak_bound
from torchdelta.errors import InfeasibleError
from torchdelta.planners import DEFAULT_EFFORT, get, plan_step
from torchdelta.planners.fitting import BatchSearch, least_budget
from torchdelta.planners.literature.autoswap import SCORES
from torchdelta.simulate import Options, simulate_plan
from torchdelta.trace.model import peak

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import DecisionClass
    from torchdelta.planners import Effort
    from torchdelta.trace.model import Trace

Row = dict[str, Any]

OURS = "torchdelta"
FAR = 0.015
"""From here on a plan is far from the bound, as a share of the plain step's time."""

WITHIN = 0.0099
"""What is to be proved where a plan is far from the bound: that no plan of its class is faster by more of the step."""

SLOWDOWNS = (1.05, 1.10, 1.25)
DELTA_MULTIPLES = {"resnet50": 2.04, "resnet101": 2.25, "gpt2_large": 5.5, "gpt2_xl": 6.0}
"""Published multiples of the plain batch (DELTA 2022 for ResNets, DELTA 2024 for GPT-2)."""


def parse_label(label: str) -> tuple[str, DecisionClass | None, Effort]:
    """Return a planner's name, class and effort: of `torchdelta/extended:best`, of `torchdelta:fast`, of `dtr`.

    Without a class it is the planner's own.
    """
    planner, _, effort = label.partition(":")
    name, _, decision_class = planner.partition("/")
    return name, cast("DecisionClass | None", decision_class or None), cast("Effort", effort or DEFAULT_EFFORT)


def overheads(case: Case, shares: Sequence[float], planners: Sequence[str], *, with_bound: bool) -> Iterator[Row]:
    """Yield a row a budget: what each planner's plan costs there, and the bound.

    The batch is the largest that plain fits; activations only (plain SGD).
    """
    machine = case.machine
    batch_size = largest_plain_batch(case.model, machine, with_optimizer=False)
    trace = step(case.model, machine, max(batch_size, 1), with_optimizer=False)
    plain_peak_bytes = peak(trace, with_workspace=True).size_bytes
    for share in shares:
        budget_bytes = int(share * plain_peak_bytes)
        row: Row = {
            "case": case.name,
            "batch_size": batch_size,
            "plain_peak_bytes": plain_peak_bytes,
            "share": share,
            "budget_bytes": budget_bytes,
            "lower_bound_bytes": least_peak_bound(trace),
            "planners": {name: overhead(trace, machine, budget_bytes, name) for name in planners},
        }
        if with_bound:
            start_s = time.process_time()
            proved = bound(trace, machine, budget_bytes)
            row["bound"] = {
                "class": proved.decision_class,
                "feasible": proved.feasible,
                "overhead": proved.overhead if proved.feasible else None,
                "solve_s": time.process_time() - start_s,
            }
        yield row


def is_far_from_bound(row: Row) -> bool:
    """Tell whether the best plan of a row takes over a point and a half more than what the linear program proves."""
    best, proved = row["planners"].get(f"{OURS}:best", {}), row.get("bound", {}).get("overhead")
    return proved is not None and best.get("feasible", False) and best["overhead"] > proved + FAR


def whole_bound(row: Row, case: Case) -> Row:
    """Return what is proved of a row with whole tensors: no more than what shows that the plan is near the best."""
    trace = step(case.model, case.machine, row["batch_size"], with_optimizer=False)
    plain_s = math.fsum(op.time_s for op in trace.ops)
    ceiling_s = plain_s * (1 + row["planners"][f"{OURS}:best"]["overhead"] - WITHIN)
    start_s = time.process_time()
    proved_s = nested_bound(trace, case.machine, row["budget_bytes"], ceiling_s)
    return {
        "class": "saved",
        "overhead": proved_s / plain_s - 1,
        "ceiling": ceiling_s / plain_s - 1,
        "solve_s": time.process_time() - start_s,
    }


def overhead(trace: Trace, machine: Machine, budget_bytes: int, planner: str) -> Row:
    """Return what a planner's plan costs, or the least budget that it found."""
    name, decision_class, effort = parse_label(planner)
    try:
        found = plan_step(trace, machine, budget_bytes, planner=name, decision_class=decision_class, effort=effort)
    except InfeasibleError as error:
        return {"feasible": False, "least_budget_bytes": error.least_budget_bytes}
    row: Row = {
        "feasible": True,
        "overhead": found.overhead,
        "stall_s": found.simulation.stall_s,
        "recompute_s": found.simulation.recompute_s,
        "swapped_out_bytes": found.simulation.swapped_out_bytes,
        "class": found.plan.header.decision_class,
        "plan_s": found.planning_s,
    }
    if name == "delta-2022-released":
        # The published code copies synchronously: that is its figure; the other is what a better runtime makes of it.
        row["overhead_with_prefetch"] = simulate_plan(found.trace, machine, found.plan, options=Options()).overhead
    return row


def floor(case: Case, planners: Sequence[str]) -> Row:
    """Return the least budget at which each planner finds a plan, and the proved lower bound."""
    machine = case.machine
    batch_size = largest_plain_batch(case.model, machine, with_optimizer=False)
    trace = step(case.model, machine, max(batch_size, 1), with_optimizer=False)
    found: dict[str, int] = {}
    for planner in planners:
        name, decision_class, effort = parse_label(planner)
        choose = get(name, decision_class)
        found[planner] = least_budget(trace, machine, choose, effort, precision=100).budget_bytes
    return {
        "case": case.name,
        "plain_peak_bytes": peak(trace, with_workspace=True).size_bytes,
        "least_budget_bytes": found,
        "lower_bound_bytes": least_peak_bound(trace),
    }


def batches(case: Case, effort: Effort) -> Row:
    """Return the largest batches at the machine's memory, optimizer states included, and what DELTA's multiples cost.

    The slowdown is of the time a sample, against plain at the largest batch that plain fits (at batch 1 if none does);
    `slowdown_accumulated` is against plain that reaches the same batch by gradient accumulation in micro-batches of
    that size, so that its optimizer steps as rarely as ours. `host_bytes` is the most pinned host memory that the plan
    fills at once.
    """
    machine = case.machine
    plain_batch = largest_plain_batch(case.model, machine, with_optimizer=True)
    plain = step(case.model, machine, max(plain_batch, 1), with_optimizer=True)
    plain_sample_s = sum(op.time_s for op in plain.ops) / max(plain_batch, 1)
    optimizer_s = sum(op.time_s for op in plain.ops if op.phase == "optimizer")

    def accumulated_sample_s(batch_size: int) -> float:
        return plain_sample_s - optimizer_s / max(plain_batch, 1) + optimizer_s / batch_size

    host_bytes: dict[int, int] = {}

    def sample_time_s(batch_size: int, how: Effort = effort) -> float:
        trace = step(case.model, machine, batch_size, with_optimizer=True)
        try:
            prediction = plan_step(trace, machine, machine.memory_bytes, planner=OURS, effort=how)
        except InfeasibleError:
            return float("inf")
        host_bytes[batch_size] = prediction.simulation.host_peak_bytes
        return prediction.time_s / batch_size

    search = BatchSearch(sample_time_s)
    row: Row = {"case": case.name, "plain_batch": plain_batch, "effort": effort, "largest": {}}
    for slowdown in (*SLOWDOWNS, float("inf")):
        found = search.largest(slowdown * plain_sample_s, first=max(plain_batch, 1))
        row["largest"]["at all" if slowdown == float("inf") else f"{slowdown:.2f}"] = found and {
            "batch_size": found.size,
            "multiple": found.size / plain_batch if plain_batch else None,
            "slowdown": found.sample_time_s / plain_sample_s,
            "slowdown_accumulated": found.sample_time_s / accumulated_sample_s(found.size),
            "host_bytes": host_bytes[found.size],
        }
    multiple = DELTA_MULTIPLES.get(case.model)
    if multiple is not None and plain_batch:
        batch_size = int(multiple * plain_batch)
        sample_s = sample_time_s(batch_size, "best")
        row["at_delta"] = {
            "multiple": multiple,
            "batch_size": batch_size,
            "slowdown": _finite(sample_s / plain_sample_s),
            "slowdown_accumulated": _finite(sample_s / accumulated_sample_s(batch_size)),
            "host_bytes": host_bytes.get(batch_size),
        }
    return row


def autoswap(model: str, machine: Machine, batch_size: int) -> Row:
    """Return what each of AutoSwap's scores saves without any waiting.

    Of the load of variables, as the paper counts it: what ops take inside themselves is left out.
    """
    priced = step(model, machine, batch_size, with_optimizer=True)
    trace = replace(priced, ops=tuple(replace(op, workspace_bytes=0) for op in priced.ops))
    found = {score: reduction(trace, machine, score) for score in SCORES}
    return {
        "model": model,
        "machine": machine.name,
        "batch_size": batch_size,
        "plain_peak_bytes": found[SCORES[0]].plain_peak_bytes,
        "reduction": {score: result.reduction for score, result in found.items()},
    }


def planning_time(case: Case, effort: Effort, share: float, rounds: int) -> Row:
    """Return how long the default planner thinks, warm: the least of some rounds, in seconds of this process."""
    machine = case.machine
    batch_size = largest_plain_batch(case.model, machine, with_optimizer=False)
    trace = step(case.model, machine, max(batch_size, 1), with_optimizer=False)
    budget_bytes = int(share * peak(trace, with_workspace=True).size_bytes)
    times_s: list[float] = []
    for _ in range(rounds + 1):
        start_s = time.process_time()
        get(OURS)(trace, machine, budget_bytes, effort)
        times_s.append(time.process_time() - start_s)
    return {
        "case": case.name,
        "effort": effort,
        "share": share,
        "num_ops": len(trace.ops),
        "first_s": times_s[0],
        "warm_s": min(times_s[1:]),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
