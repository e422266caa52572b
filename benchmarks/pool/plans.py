"""The pool under plans: is the footprint within every budget whose plan would also fit in a little less?

For every case of the papers and every budget: when the planner finds a plan for 98 % of the budget, `plan --pool` has
to find one whose addresses fit the whole, with the default planner, or else with the one of the larger class. Raw
figures beside it: the fragmentation of the placement of the former.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.papers.subjects import CASES, Case, largest_plain_batch, step
from torchdelta.errors import InfeasibleError, PoolError
from torchdelta.planners import DEFAULT_PLANNER, get
from torchdelta.pool.planned import lives_of_plan, plan_within_footprint
from torchdelta.pool.solvers import solve
from torchdelta.pool.validate import check
from torchdelta.trace.model import peak

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchdelta.plan.model import DecisionClass
    from torchdelta.trace.model import Trace

ALIGNMENT_BYTES = 512  # of torch's CUDA allocator
FEASIBLE_SHARE = 0.98
CLASSES: tuple[DecisionClass, ...] = ("saved", "extended")
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)


def pooled_plans(names: Sequence[str], shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Plan and place every case at every budget; one row each."""
    for name in names:
        case = CASES[name]
        machine = case.machine
        batch_size = largest_plain_batch(case.model, machine, with_optimizer=False)
        trace = step(case.model, machine, batch_size, with_optimizer=False)
        plain_bytes = peak(trace, with_workspace=True).size_bytes
        for share in shares:
            yield {"case": name, "share": share} | _row(case, trace, int(share * plain_bytes))


def _row(case: Case, trace: Trace, budget_bytes: int) -> dict[str, Any]:
    machine = case.machine
    try:
        slightly_less = get(DEFAULT_PLANNER, CLASSES[0])(trace, machine, int(FEASIBLE_SHARE * budget_bytes), "fast")
    except InfeasibleError as error:
        return {"budget_bytes": budget_bytes, "feasible": False, "why": str(error)}
    began_s = time.perf_counter()
    instance = lives_of_plan(trace, slightly_less, alignment_bytes=ALIGNMENT_BYTES)
    alone = solve(instance)
    check(instance, alone.offsets_bytes)
    row: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "feasible": True,
        "fits": False,
        "num_lives": len(instance),
        "fragmentation_at_98": alone.fragmentation,
        "time_at_98_s": time.perf_counter() - began_s,
    }
    for decision_class in CLASSES:
        plan = get(DEFAULT_PLANNER, decision_class)
        began_s = time.perf_counter()
        try:
            pooled = plan_within_footprint(
                trace,
                budget_bytes,
                lambda size_bytes, plan=plan: plan(trace, machine, size_bytes, "fast"),
                alignment_bytes=ALIGNMENT_BYTES,
            )
        except (InfeasibleError, PoolError) as error:
            row[f"why_not_{decision_class}"] = str(error)
            continue
        return row | {
            "planner": DEFAULT_PLANNER,
            "class": decision_class,
            "fits": pooled.placement.footprint_bytes <= budget_bytes,
            "footprint_bytes": pooled.placement.footprint_bytes,
            "load_bytes": pooled.placement.lower_bound_bytes,
            "num_tries": pooled.num_tries,
            "time_s": time.perf_counter() - began_s,
        }
    return row
