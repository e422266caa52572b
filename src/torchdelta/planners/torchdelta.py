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
from torchdelta.planners import search
from torchdelta.planners.anneal import anneal
from torchdelta.planners.outcome import finished
from torchdelta.planners.registry import Effort, register
from torchdelta.planners.windows import try_windows
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["NEAR_LEAST", "choose", "least_peak", "plan", "plan_all", "plan_extended"]

Codes = NDArray[np.int8]

_log = logging.getLogger(__name__)

_FAST_STARTS = ((0.1, 0, 1.0), (0.3, 0, 1.0))
_SMALL_STARTS = ((0.0, 1, 1.0), (0.05, 0, 1.0), (0.1, 0, 1.0), (0.3, 0, 0.8), (1.0, 0, 1.0))
_SHORT_STARTS = ((0.0, 1, 1.0), (0.3, 0, 0.8), (1.0, 0, 1.0))
_BEST_STARTS = ((0.0, 3, 1.0), (0.05, 1, 1.0), (0.1, 1, 1.0), (0.2, 0, 1.0), (0.0, 1, 0.95))
_SMALL_BEST_STARTS = (
    (0.0, 3, 1.0),
    (0.05, 3, 1.0),
    (0.1, 1, 1.0),
    (0.2, 0, 1.0),
    (0.3, 1, 1.0),
    (0.0, 1, 0.97),
    (0.0, 1, 0.93),
    (1.0, 1, 0.88),
    (0.3, 3, 0.8),
)
"""Price of a link's byte as a share of its time, how many neighbours are priced anew, and the share of the budget at
which the start is made: what is best with a little less memory is a plan here too."""

_SMALL = 300
"""Up to this many gaps a problem can afford more starts."""

_SHAKES = ((4, 0.1), (8, 0.0), (4, 0.0), (8, 0.05))
"""How far each part of the shakes reaches, and how much slower it may go on from, as a share of the overhead."""

_SHAKEN_PARTS = 4
_FEW_EXCHANGES = 3_000
_EXCHANGES = 50_000
"""The most evaluations of one round of exchanges."""

_FEW_WINDOWS = (40, 3)
_WINDOWS = (100, 5)
"""How many of the largest gaps are looked at in windows, and how wide those are."""

_WINDOW_ROUNDS = 3

_LARGE = 0.1
"""What everything else hangs on: buffers of at least so large a share of the budget."""

_REBUILDS = 4
"""The most of them that `fast` has stay, one at a time, the largest first."""

_SHORT_OF_MEMORY = 1.6
"""Budgets below so many times the least peak have little room: there `fast` rebuilds and looks at windows. It does not
shake there, which takes as long and found less."""

NEAR_LEAST = 1.8
"""Budgets below so many times the least peak have so little room that `best` anneals too: it found nothing above. There
larger classes gain the most as well."""

_ANNEALED_OPS = 700_000_000
"""How many ops annealing simulates if no replay is among them, in all parts together."""

_CHANGES_A_GAP = (150, 2700)
"""How many changes that leaves for each gap in each part: no more than the second are tried, and with fewer than the
first it would end where it came to by chance, and is left out."""

_HOT, _WARM, _TEPID = (0.05, 0.001), (0.02, 0.0005), (0.01, 0.0005)
_HEATS = (_HOT, _WARM, _HOT, _WARM, _TEPID, _TEPID)
"""The heats of its parts. Within the class *saved* all but the tepid ones begin with everything on the device, each for
itself; the others go on from the best decision."""

_FEW_SHAKES = 20
_SHAKES_A_GAP = 40
_SHAKEN_OPS = 500_000_000
"""How many times `best` shakes: so many over gaps times ops, and not more often than that for each gap."""


@register("torchdelta")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:
    """Choose within the class *saved*.

    Raises:
        InfeasibleError: The budget is below the least peak of the class, or the host has no room.
    """
    problem = Problem.of(trace, machine)
    codes = choose(problem, budget_bytes, effort)
    least_bytes = least_peak(problem)
    return finished(problem, codes, budget_bytes, planner="torchdelta", effort=effort, least_bytes=least_bytes)


@register("torchdelta-extended")
def plan_extended(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:
    """Choose within the class *extended*, starting from the choice within *saved*: never worse than that.

    Raises:
        InfeasibleError: No plan within the budget was found.
    """
    return _plan_in(trace, machine, budget_bytes, effort, "extended")


@register("torchdelta-all")
def plan_all(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:
    """Choose within the class *all*, starting from the choice within *saved*: never worse than that.

    Parameters, gradients and optimizer states leave between two uses, over the end of the step too: what the optimizer
    alone uses can be away for the whole rest of it.

    Raises:
        InfeasibleError: No plan within the budget was found.
    """
    return _plan_in(trace, machine, budget_bytes, effort, "all")


def _plan_in(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort, decision_class: DecisionClass) -> Plan:
    saved = Problem.of(trace, machine)
    start = choose(saved, budget_bytes, effort)
    problem = Problem.of(trace, machine, decision_class=decision_class)
    starts = [_carried_over(saved, start, problem), *_with_states_away(saved, problem, budget_bytes)]

    def cost(codes: Codes) -> tuple[int, float]:
        score = problem.score(codes, budget_bytes)
        return (score.excess_sum_bytes, score.time_s)

    if len(starts) > 1 and cost(starts[0])[0] > 0:
        # Near the least budget the one that passes it by less need not be the better one to go on from.
        starts = [choose(problem, budget_bytes, "fast", start=codes) for codes in starts]
    codes = choose(problem, budget_bytes, effort, start=min(starts, key=cost))
    least_bytes = least_peak(problem)
    planner = f"torchdelta-{decision_class}"
    return finished(problem, codes, budget_bytes, planner=planner, effort=effort, least_bytes=least_bytes)


def least_peak(problem: Problem) -> int:
    """Return the least peak that is surely found: that of swapping everything.

    Within the class *saved* no plan has a lower one: nothing is away for longer, and no replay adds to it.
    """
    return problem.score(np.full(len(problem.gaps), Code.SWAP, np.int8), 0).peak_bytes


def choose(problem: Problem, budget_bytes: int, effort: Effort, *, start: Codes | None = None) -> Codes:
    """Return the best codes found; they may pass the budget if nothing else was found.

    Args:
        problem: Of any class.
        budget_bytes: The budget.
        effort: How long to think.
        start: Codes to start from as well.
    """
    keep = problem.keep_all()
    limits = problem.limits(budget_bytes)
    if not len(keep) or problem.score(keep, budget_bytes).is_feasible:
        return keep
    hunt = _Hunt(problem, limits)
    small = len(keep) <= _SMALL
    is_short = budget_bytes < _SHORT_OF_MEMORY * least_peak(problem)
    if effort == "best" and start is None:
        hunt.follow(choose(problem, budget_bytes, "fast"), rounds=2)
    if start is not None:
        hunt.follow(start.copy(), rounds=2 if effort == "best" else 1)
        starts = ()  # a larger class has too many gaps to begin anew
    elif effort == "best":
        starts = _SMALL_BEST_STARTS if small else _BEST_STARTS
    else:
        starts = (_SHORT_STARTS if is_short else _SMALL_STARTS) if small else _FAST_STARTS
    for link_price, neighbours, share in starts:
        hunt.begin(share, link_price, neighbours)
    if effort == "best" and start is None and problem.decision_class == "saved":
        for codes in _relaxed_starts(problem, budget_bytes):
            hunt.release(codes, 1)
    if hunt.excess > 0:
        hunt.release(hunt.codes.copy(), 0)
    if hunt.excess > 0:
        hunt.follow(np.where(hunt.allowed[:, Code.SWAP], Code.SWAP, Code.KEEP).astype(np.int8), rounds=3)
    if effort == "best":
        hunt.exchange(_EXCHANGES)
        hunt.try_windows(*_WINDOWS)
        steps = min(_SHAKES_A_GAP * len(keep), _SHAKEN_OPS // (len(keep) * len(problem.trace.ops)))
        hunt.shake(steps, _SHAKEN_PARTS, _EXCHANGES)
        hunt.try_windows(*_WINDOWS)
        if budget_bytes < NEAR_LEAST * least_peak(problem):
            hunt.anneal(anew=start is None)
    elif small and start is None and is_short:
        hunt.rebuild()
        hunt.exchange(_FEW_EXCHANGES)
        hunt.try_windows(*_FEW_WINDOWS)
    elif small and start is None:
        hunt.shake(_FEW_SHAKES, 1, _FEW_EXCHANGES)
    return hunt.codes


class _Hunt:
    """The best decision so far. Lives as long as one call of `choose`."""

    def __init__(self, problem: Problem, limits: NDArray[np.int64]) -> None:
        self.problem = problem
        self.limits = limits
        self.allowed = _allowed(problem)
        self.sizes = problem.static.size[problem.static.gap_buffer[: len(problem.gaps)]]
        self.everyone = np.arange(len(self.sizes), dtype=np.int64)
        self.largest_first = np.argsort(-self.sizes, kind="stable").astype(np.int64)
        self.codes = problem.keep_all()
        self.first_prices: dict[float, search.Prices] = {}  # of everything on the device, by the share of the budget
        self.excess, self.time_s = 2**62, float("inf")

    def begin(self, share: float, link_price: float, neighbours: int) -> None:
        """Let go of what has to leave, from everything on the device, as if there were a share of the budget."""
        static, work, allowed, everyone = self.problem.static, self.problem.work, self.allowed, self.everyone
        limits, codes = self.limits.copy(), self.problem.keep_all()
        limits[0] = int(share * limits[0])
        if share not in self.first_prices:
            self.first_prices[share] = search.price_each(static, work, codes, limits, allowed, everyone)
        prices = self.first_prices[share]
        search.release(static, work, codes, limits, allowed, everyone, link_price, neighbours, prices)
        self.follow(codes, rounds=1)

    def release(self, codes: Codes, neighbours: int) -> None:
        static, work, limits = self.problem.static, self.problem.work, self.limits
        search.release(
            static, work, codes, limits, self.allowed, self.everyone, 0.0, neighbours, search.unpriced(codes)
        )
        self.follow(codes, rounds=1)

    def follow(self, codes: Codes, *, rounds: int) -> None:
        static, work = self.problem.static, self.problem.work
        found = search.improve(static, work, codes, self.limits, self.allowed, self.largest_first, rounds)
        self._take(codes, found)

    def rebuild(self) -> None:
        """Have a large buffer stay that is swapped, and decide anew what the smaller ones do.

        Of the changes of one large buffer this is the one that helped most often; a swap looks cheap while the link is
        still free, and what it makes others wait for shows only when all have been decided.
        """
        static, work, limits = self.problem.static, self.problem.work, self.limits
        is_large = self.sizes >= _LARGE * limits[0]
        smaller = np.flatnonzero(~is_large)
        swapped = is_large & ((self.codes == Code.SWAP) | (self.codes == Code.DISK))
        decided = np.where(is_large, self.codes, Code.KEEP).astype(np.int8)
        for gap in self.largest_first[swapped[self.largest_first]][:_REBUILDS]:
            codes = decided.copy()
            codes[gap] = Code.KEEP
            search.release(static, work, codes, limits, self.allowed, smaller, 0.0, 0, search.unpriced(codes))
            self.follow(codes, rounds=1)

    def exchange(self, most: int) -> None:
        static, work = self.problem.static, self.problem.work
        codes = self.codes.copy()
        self._take(codes, search.exchange(static, work, codes, self.limits, self.allowed, most))

    def try_windows(self, largest: int, width: int) -> None:
        static, work = self.problem.static, self.problem.work
        order = self._by_next_use(self.largest_first[:largest])
        codes = self.codes.copy()
        found = try_windows(static, work, codes, self.limits, self.allowed, order, width, _WINDOW_ROUNDS)
        if (found[0], found[1]) < (self.excess, self.time_s):
            self._take(codes, found)
            self.follow(codes.copy(), rounds=1)

    def shake(self, steps: int, parts: int, most_exchanges: int) -> None:
        static, work = self.problem.static, self.problem.work
        for part in range(parts):
            codes = self.codes.copy()
            reach, slack = _SHAKES[part % len(_SHAKES)]
            search.shake(
                static,
                work,
                codes,
                self.limits,
                self.allowed,
                steps // parts,
                reach,
                slack,
                part + 1,
                search.unpriced(codes),
            )
            found = search.improve(static, work, codes, self.limits, self.allowed, self.largest_first, 2)
            self._take(codes, found)
            self.exchange(most_exchanges)

    def anneal(self, *, anew: bool) -> None:
        static, work = self.problem.static, self.problem.work
        keep = self.problem.keep_all()
        least, most = (changes * len(keep) for changes in _CHANGES_A_GAP)
        steps = min(most, _ANNEALED_OPS // (len(self.problem.trace.ops) * len(_HEATS)))
        if steps < least or self.excess > 0:
            return
        order = self._by_next_use(self.everyone)
        for part, heats in enumerate(_HEATS):
            unit_s = self.time_s - self.problem.plain_time_s
            if unit_s <= 1e-9 * self.problem.plain_time_s:
                return  # it costs nothing
            codes = keep.copy() if anew and heats != _TEPID else self.codes.copy()
            anneal(static, work, codes, self.limits, self.allowed, order, unit_s, heats, steps, part)
            self.follow(codes, rounds=2)

    def _by_next_use(self, gaps: NDArray[np.int64]) -> NDArray[np.int64]:
        return gaps[np.argsort(self.problem.static.gap_next[gaps], kind="stable")]

    def _take(self, codes: Codes, found: tuple[int, float]) -> None:
        if (found[0], found[1]) < (self.excess, self.time_s):
            self.codes = codes
            self.excess, self.time_s = found


def _allowed(problem: Problem) -> NDArray[np.bool_]:
    """Return which codes each gap may take."""
    allowed = np.zeros((len(problem.gaps), len(Code)), np.bool_)
    can_recompute = np.array([gap.can_recompute for gap in problem.gaps], np.bool_)
    allowed[:, Code.KEEP] = True
    allowed[:, Code.SWAP] = True
    allowed[:, Code.DISK] = problem.disk_budget_bytes > 0 and problem.host_budget_bytes < problem.plain_peak_bytes
    allowed[:, Code.RECOMPUTE] = can_recompute
    allowed[:, Code.AGAIN] = can_recompute & (problem.decision_class != "saved")
    return allowed


def _relaxed_starts(problem: Problem, budget_bytes: int) -> list[Codes]:
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


def _carried_over(saved: Problem, codes: Codes, problem: Problem) -> Codes:
    carried = problem.keep_all()
    carried[_places(saved, problem)] = codes
    return carried


def _places(saved: Problem, problem: Problem) -> NDArray[np.int64]:
    """Return where the gaps of the class *saved* are among those of a larger one."""
    place = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(problem.gaps)}
    return np.array([place[gap.buffer_id, gap.last_use_op] for gap in saved.gaps], np.int64)


def _with_states_away(saved: Problem, problem: Problem, budget_bytes: int) -> list[Codes]:
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
    limits, allowed = problem.limits(budget_bytes), _allowed(problem)
    among = np.union1d(_places(saved, problem), over_end)
    search.release(
        problem.static, problem.work, codes, limits, allowed, among, _FAST_STARTS[0][0], 0, search.unpriced(codes)
    )
    return [codes]
