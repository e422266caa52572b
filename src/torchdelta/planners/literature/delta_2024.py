"""`delta-2024`: which tensors leave as a 0/1 knapsack with a polynomial heuristic, after DELTA 2024.

Source: "DELTA: Memory-Efficient Training via Dynamic Fine-Grained Recomputation and Swapping" (ACM TACO 2024,
10.1145/3689338), of which the abstract alone is public. From it: memory and throughput are optimised together, cast as
a 0/1 knapsack, solved by a heuristic of polynomial complexity, with prefetching in both directions. The statement of
the knapsack, the heuristic and the meaning of "bidirectional" are not public. What follows is **our reading**:

- Items are the tensors that are saved across the peak (class *saved*); the weight of an item is its bytes, its cost the
  lesser of the stall of a swap and the time of a recomputation. Of all sets with at least `peak - budget` bytes, the
  cheapest is wanted: the complement of the knapsack of what to keep.
- The heuristic takes the item with the least cost a byte until the need is met, then drops picks that turned out to be
  redundant, the most expensive first. Where the load is above the budget elsewhere too, the same again there.
- Replays take memory that the knapsack does not see. Where its choice passes the budget, recomputed tensors are swapped
  instead until it holds.
- The stall of a swap is what the link has no time for, given the swaps already picked: copies out run early in forward
  and copies back early in backward (our meaning of "bidirectional"). A knapsack that prices each swap as if it had the
  link for itself is worse by an order of magnitude. The time of a recomputation is that of its own op and of what died
  before it; that it grows when parents leave as well is not seen (the default planner sees it).

At most n picks, each from a heap of n items: O(n log n) prices, each linear in the ops in an array operation.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.ideal import IdealLoad, LinkSlack
from torchdelta.planners.literature.lineage import Lineage, lineage
from torchdelta.planners.literature.lower_limit import NoChoiceError, choose_within_budget
from torchdelta.planners.problem_within import problem_within
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["plan"]

_LIMITS_TO_REPAIR = 20
"""Limits, from the budget down, under which a choice is made that a repair may turn into a plan that holds it."""


@register("delta-2024")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Let the set of saved tensors leave that the knapsack's heuristic finds cheapest."""
    problem = problem_within(trace, machine, budget_bytes)
    relations = lineage(trace, {gap.buffer_id for gap in problem.gaps})
    found = choose_within_budget(
        problem, budget_bytes, lambda limit_bytes: _choose(problem, machine, relations, limit_bytes)
    )
    codes = found.codes
    if not problem.score(codes, budget_bytes).is_feasible:
        for limit_bytes in range(budget_bytes, 0, -max(budget_bytes // _LIMITS_TO_REPAIR, 1)):
            try:
                chosen = _choose(problem, machine, relations, limit_bytes)
            except NoChoiceError:
                break
            repaired = _repair(problem, relations, chosen, budget_bytes)
            if repaired is not None:
                codes = repaired
                break
    return feasible_plan(problem, codes, budget_bytes, planner="delta-2024", least_bytes=found.least_bytes)


def _repair(
    problem: PlanningProblem, relations: Lineage, codes: NDArray[np.int8], budget_bytes: int
) -> NDArray[np.int8] | None:
    """Swap as few as possible of the tensors that would be recomputed, because replays take memory that swaps do not.

    The most expensive replays become swaps first; the fewest that are enough are found by halves. Each is then made a
    replay again if the step is faster and still fits: n more evaluations. None if swapping all of them is not enough.
    """
    order = sorted(
        (index for index, code in enumerate(codes) if code == Code.RECOMPUTE),
        key=lambda index: (-float(relations.cost_s[problem.gaps[index].buffer_id]), index),
    )

    def with_swapped(num_swapped: int) -> NDArray[np.int8]:
        changed = codes.copy()
        changed[order[:num_swapped]] = Code.SWAP
        return changed

    enough = len(order)
    if not problem.score(with_swapped(enough), budget_bytes).is_feasible:
        return None
    too_few = 0
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if problem.score(with_swapped(middle), budget_bytes).is_feasible:
            enough = middle
        else:
            too_few = middle
    repaired = with_swapped(enough)
    time_s = problem.score(repaired, budget_bytes).time_s
    for index in reversed(order[:enough]):
        repaired[index] = Code.RECOMPUTE
        score = problem.score(repaired, budget_bytes)
        if score.is_feasible and score.time_s < time_s:
            time_s = score.time_s
        else:
            repaired[index] = Code.SWAP
    return repaired


def _choose(problem: PlanningProblem, machine: Machine, relations: Lineage, limit_bytes: int) -> NDArray[np.int8]:
    load = IdealLoad(problem.trace)
    slack = LinkSlack(problem.trace, machine, load.peak_op)
    codes = problem.keep_all()
    picks: list[tuple[float, int]] = []  # cost a byte, item
    while load.peak_bytes > limit_bytes:
        moment = load.peak_op
        slack = slack.at(moment)
        heap: list[tuple[float, int, int]] = []
        for index, gap in enumerate(problem.gaps):
            if codes[index] == Code.KEEP and gap.last_use_op < moment < gap.next_use_op:
                heap.append((_price(problem, relations, slack, index)[0], -gap.size_bytes, index))
        heapq.heapify(heap)
        while int(load.load_bytes[moment]) > limit_bytes:
            if not heap:
                raise NoChoiceError
            _, minus_bytes, index = heapq.heappop(heap)
            # Prices only rise as the link fills: whoever is still the cheapest at today's price is the one.
            price, code = _price(problem, relations, slack, index)
            if heap and price > heap[0][0]:
                heapq.heappush(heap, (price, minus_bytes, index))
                continue
            codes[index] = code
            picks.append((price, index))
            load.leave(problem.gaps[index])
            if code == Code.SWAP:
                slack.book(problem.gaps[index])
    for _, index in sorted(picks, reverse=True):
        if load.can_stay(problem.gaps[index], limit_bytes):
            load.stay(problem.gaps[index])
            codes[index] = Code.KEEP
    return codes


def _price(problem: PlanningProblem, relations: Lineage, slack: LinkSlack, index: int) -> tuple[float, int]:
    """Return the cost a byte of an item, and the action that has it."""
    gap = problem.gaps[index]
    swap_s = slack.stall_s(gap)
    recompute_s = float(relations.cost_s[gap.buffer_id]) if gap.can_recompute_at_use else float("inf")
    if recompute_s < swap_s:
        return recompute_s / gap.size_bytes, int(Code.RECOMPUTE)
    return swap_s / gap.size_bytes, int(Code.SWAP)
