"""`torchdelta`, the default planner: swap and recompute together, every choice priced by the simulator.

Ours. It starts with everything on the device and lets go of what relieves the moments above the budget the most for
each second that it costs; that cost is the difference of two simulations, so replay chains that grow and links that
fill are in it. Then it takes back what is no longer needed, exchanges swaps for replays, and changes two gaps at once.
Starts differ in the price of a link's byte (a small one makes cheap replays leave the link to others), in how far they
look around and in how much of the budget they use; `best` also starts from the linear program of the bound, if its
solver is there, shakes, and near the least budget anneals.

Guarantees: never a plan above the budget; within the class *saved* it finds a plan whenever there is one and the host
has room, because swapping everything reaches the least peak of the class, and the search may start there.
Deterministic. Known weakness: near the least budget `fast` is a local optimum of single moves and of few neighbours;
of its choices of large buffers it only takes back swaps, one at a time. Steps with too many ops and gaps are not
annealed.

Each simulation is linear in the ops; `fast` takes some thousands of them, `best` up to some millions.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from torchdelta.bounds.lp_bound import bound
from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass, Plan
from torchdelta.planners.default import moves
from torchdelta.planners.default.search import Search, Start, allowed_codes
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.problem_within import least_peak, least_that_fits, problem_within
from torchdelta.planners.registry import Effort, Planner, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["NEAR_LEAST", "choose"]

Codes = NDArray[np.int8]

_log = logging.getLogger(__name__)

# Each is a price of a link's byte, how many neighbours are priced anew, and a share of the budget: see `Start`.
_FAST_STARTS = (Start(0.1, 0, 1.0), Start(0.3, 0, 1.0))
_SMALL_STARTS = (
    Start(0.0, 1, 1.0),
    Start(0.05, 0, 1.0),
    Start(0.1, 0, 1.0),
    Start(0.3, 0, 0.8),
    Start(1.0, 0, 1.0),
)
"""Starts of `fast` on a small problem with room."""

_SHORT_STARTS = (Start(0.0, 1, 1.0), Start(0.3, 0, 0.8), Start(1.0, 0, 1.0))
"""Starts of `fast` on a small problem that is short of memory."""

_BEST_STARTS = (
    Start(0.0, 3, 1.0),
    Start(0.05, 1, 1.0),
    Start(0.1, 1, 1.0),
    Start(0.2, 0, 1.0),
    Start(0.0, 1, 0.95),
)
_SMALL_BEST_STARTS = (
    Start(0.0, 3, 1.0),
    Start(0.05, 3, 1.0),
    Start(0.1, 1, 1.0),
    Start(0.2, 0, 1.0),
    Start(0.3, 1, 1.0),
    Start(0.0, 1, 0.97),
    Start(0.0, 1, 0.93),
    Start(1.0, 1, 0.88),
    Start(0.3, 3, 0.8),
)

_MAX_GAPS_OF_SMALL = 300
"""Problems with at most this many gaps count as small, and can afford more starts."""

_NUM_SHAKEN_PARTS = 4
"""Shakes of `best` are made in so many parts."""

_MAX_EXCHANGES_FAST = 3_000
_MAX_EXCHANGES_BEST = 50_000
"""The most evaluations of one round of exchanges."""

_WINDOWS_FAST = (40, 3)
_WINDOWS_BEST = (100, 5)
"""How many of the largest gaps are looked at in windows, and how many gaps one window has."""

_SHORT_OF_MEMORY = 1.6
"""Budgets below this multiple of the least peak are short of memory: there `fast` rebuilds and looks at windows. It
does not shake there, which takes as long and found less."""

NEAR_LEAST = 1.8
"""Budgets below this multiple of the least peak are near it: there `best` anneals too, which found nothing above, and
larger classes gain the most."""

_NUM_SHAKES_FAST = 20
_SHAKES_A_GAP = 40
_SHAKEN_OPS = 500_000_000
"""How many times `best` shakes: `_SHAKEN_OPS` over gaps times ops, and at most `_SHAKES_A_GAP` for each gap."""


def _planner(decision_class: DecisionClass) -> Planner:
    def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:
        problem = problem_within(trace, machine, budget_bytes, decision_class=decision_class)
        start = None if decision_class == "saved" else _start_within_saved(problem, budget_bytes, effort)
        codes = choose(problem, budget_bytes, effort, start=start)
        fits = problem.score(codes, budget_bytes).is_feasible
        least_bytes = None if fits else least_that_fits(problem)
        return feasible_plan(problem, codes, budget_bytes, planner="torchdelta", effort=effort, least_bytes=least_bytes)

    return plan


_CLASSES: tuple[DecisionClass, ...] = ("saved", "extended", "persistent", "all")
for _class in _CLASSES:
    register("torchdelta", _class)(_planner(_class))


def _start_within_saved(problem: PlanningProblem, budget_bytes: int, effort: Effort) -> Codes:
    """Return where a larger class starts: at the choice within *saved*, so that it is never worse than that.

    In the classes *persistent* and *all*, parameters, gradients and optimizer states leave between two uses, over the
    end of the step too: what the optimizer alone uses can be away for the whole rest of it.
    """
    saved = PlanningProblem.of(problem.trace, problem.machine, min_size_bytes=problem.min_size_bytes)
    carried = problem.keep_all()
    carried[_places(saved, problem)] = choose(saved, budget_bytes, effort)
    starts = [carried, *_with_states_away(saved, problem, budget_bytes)]

    def cost(codes: Codes) -> tuple[int, float]:
        score = problem.score(codes, budget_bytes)
        return (score.excess_sum_bytes, score.time_s)

    if len(starts) > 1 and cost(carried)[0] > 0:
        # Near the least budget the one that passes it by less need not be the better one to go on from.
        starts = [choose(problem, budget_bytes, "fast", start=codes) for codes in starts]
    return min(starts, key=cost)


def choose(problem: PlanningProblem, budget_bytes: int, effort: Effort, *, start: Codes | None = None) -> Codes:
    """Return the best codes found, also from a given start; they may pass the budget if nothing else was found."""
    keep = problem.keep_all()
    limits = problem.limits(budget_bytes)
    if not len(keep) or problem.score(keep, budget_bytes).is_feasible:
        return keep
    search = Search(problem, limits)
    small = len(keep) <= _MAX_GAPS_OF_SMALL
    is_short = budget_bytes < _SHORT_OF_MEMORY * least_peak(problem)
    if effort == "best" and start is None:
        search.follow(choose(problem, budget_bytes, "fast"), rounds=2)
    if start is not None:
        search.follow(start.copy(), rounds=2 if effort == "best" else 1)
        starts = ()  # a larger class has too many gaps to begin anew
    elif effort == "best":
        starts = _SMALL_BEST_STARTS if small else _BEST_STARTS
    else:
        starts = (_SHORT_STARTS if is_short else _SMALL_STARTS) if small else _FAST_STARTS
    for each in starts:
        search.begin(each)
    if effort == "best" and start is None and problem.decision_class == "saved":
        for codes in _relaxed_starts(problem, budget_bytes):
            search.release(codes, 1)
    if search.excess > 0:
        search.release(search.codes.copy(), 0)
    if search.excess > 0:
        search.follow(np.where(search.allowed[:, Code.SWAP], Code.SWAP, Code.KEEP).astype(np.int8), rounds=3)
    if effort == "best":
        search.exchange(_MAX_EXCHANGES_BEST)
        search.try_windows(*_WINDOWS_BEST)
        steps = min(_SHAKES_A_GAP * len(keep), _SHAKEN_OPS // (len(keep) * len(problem.trace.ops)))
        search.shake(steps, _NUM_SHAKEN_PARTS, _MAX_EXCHANGES_BEST)
        search.try_windows(*_WINDOWS_BEST)
        if budget_bytes < NEAR_LEAST * least_peak(problem):
            search.anneal(anew=start is None)
    elif small and start is None and is_short:
        search.rebuild()
        search.exchange(_MAX_EXCHANGES_FAST)
        search.try_windows(*_WINDOWS_FAST)
    elif small and start is None:
        search.shake(_NUM_SHAKES_FAST, 1, _MAX_EXCHANGES_FAST)
    return search.codes


def _relaxed_starts(problem: PlanningProblem, budget_bytes: int) -> list[Codes]:
    """Return starts from the linear program of the bound, none where its solver is missing.

    Its recomputations are good; its swaps are often shares of many buffers, and rounded they fill the link. So the
    first start takes the recomputations alone and leaves the swaps to the search.
    """
    try:
        relaxed = bound(problem.trace, problem.machine, budget_bytes)
    except PlanError as error:
        _log.info("no start from the linear program: %s", error)
        return []
    starts: list[Codes] = []
    for least_swap in (2.0, 0.5):
        codes = problem.keep_all()
        for index, gap in enumerate(problem.gaps):
            if relaxed.recompute.get(gap.buffer_id, 0.0) >= 0.5 and gap.can_recompute:
                codes[index] = Code.RECOMPUTE
            elif relaxed.swap.get(gap.buffer_id, 0.0) >= least_swap:
                codes[index] = Code.SWAP
        starts.append(codes)
    return starts


def _places(saved: PlanningProblem, problem: PlanningProblem) -> NDArray[np.int64]:
    """Return where the gaps of the class *saved* are among those of a larger one."""
    place = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(problem.gaps)}
    return np.array([place[gap.buffer_id, gap.last_use_op] for gap in saved.gaps], np.int64)


def _with_states_away(saved: PlanningProblem, problem: PlanningProblem, budget_bytes: int) -> list[Codes]:
    """Return a start that first takes the optimizer's states away over the end of the step, then what it has to.

    One state makes little room, and all of them are worth their copies together: single moves do not find this. None
    where there are no such states.
    """
    codes = problem.keep_all()
    over_end = problem.static.gap_by_next[len(problem.gaps) :]
    kinds = [problem.trace.buffers[problem.gaps[int(gap)].buffer_id].kind for gap in over_end]
    states = over_end[np.array([kind == "optimizer_state" for kind in kinds], np.bool_)]
    if not len(states) or problem.score(codes, budget_bytes).is_feasible:
        return []
    codes[states] = Code.SWAP
    limits, allowed = problem.limits(budget_bytes), allowed_codes(problem)
    among = np.union1d(_places(saved, problem), over_end)
    moves.release(
        problem.static, problem.work, codes, limits, allowed, among, _FAST_STARTS[0].link_price, 0, moves.UNPRICED
    )
    return [codes]
