"""A search for the best decision under one budget: what it has found so far, and the moves that it can make.

Each method makes one move from some decision, and takes the result if it is better: if it passes the budget by less or,
at equal excess, takes less time. The moves themselves are compiled (`moves.py`, `windows.py`, `anneal.py`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.default import moves
from torchdelta.planners.default.anneal import anneal
from torchdelta.planners.default.windows import try_windows
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem

__all__ = ["Search", "Start", "allowed_codes"]

Codes = NDArray[np.int8]

_SHAKES = ((4, 0.1), (8, 0.0), (4, 0.0), (8, 0.05))
"""For each part of the shakes in turn: the most releases that one step takes back, and how much slower a result may be
that is gone on from, as a share of the overhead."""

_WINDOW_ROUNDS = 3
"""The most times that windows go through the gaps."""

_LARGE = 0.1
"""Buffers of at least this share of the budget count as large."""

_MAX_REBUILDS = 4
"""So many of the large buffers that are swapped `rebuild` has stay at most, one at a time, the largest first."""

_ANNEALED_OPS = 700_000_000
"""How many ops annealing simulates if no replay is among them, in all parts together."""

_CHANGES_A_GAP = (150, 2700)
"""The least and the most changes that annealing tries for each gap in each part. Where `_ANNEALED_OPS` leaves fewer
than the first, it would end where chance led it, and is left out."""

_HOT, _WARM, _TEPID = (0.05, 0.001), (0.02, 0.0005), (0.01, 0.0005)
"""Heats of annealing at the first step and at the last: see `anneal`."""

_HEATS = (_HOT, _WARM, _HOT, _WARM, _TEPID, _TEPID)
"""The heats of the parts of annealing. Within the class *saved* all but the tepid ones begin with everything on the
device, each for itself; the others go on from the best decision."""


class Start(NamedTuple):
    """How one start lets go of buffers, from everything on the device."""

    link_price: float
    """What a byte over the link costs beside the waiting, as a share of its transfer's time."""

    num_neighbours: int
    """After a buffer has left, so many gaps on either side of its own are priced anew."""

    budget_share: float
    """The share of the budget that is used: what is best with a little less memory is a plan here too."""


class Search:
    """The best decision found so far for a problem and its limits. Mutable; one call of `choose` long.

    Attributes:
        problem: What is decided.
        limits: The most bytes on the device, on the host and on the disk.
        allowed: Which codes each gap may take.
        codes: The best decision so far.
        excess: By how many bytes it passes the budget, summed over the ops.
        time_s: Its seconds.
    """

    def __init__(self, problem: PlanningProblem, limits: NDArray[np.int64]) -> None:
        self.problem = problem
        self.limits = limits
        self.allowed = allowed_codes(problem)
        self.sizes = problem.static.size[problem.static.gap_buffer[: len(problem.gaps)]]
        self.all_gaps = np.arange(len(self.sizes), dtype=np.int64)
        self.largest_first = np.argsort(-self.sizes, kind="stable").astype(np.int64)
        self.codes = problem.keep_all()
        self.first_prices: dict[float, moves.Prices] = {}  # of everything on the device, by the share of the budget
        self.excess, self.time_s = 2**62, float("inf")

    def begin(self, start: Start) -> None:
        """Let go of what has to leave, from everything on the device."""
        static, work, allowed, all_gaps = self.problem.static, self.problem.work, self.allowed, self.all_gaps
        limits, codes = self.limits.copy(), self.problem.keep_all()
        share = start.budget_share
        limits[0] = int(share * limits[0])
        if share not in self.first_prices:
            self.first_prices[share] = moves.price_each(static, work, codes, limits, allowed, all_gaps)
        prices = self.first_prices[share]
        moves.release(static, work, codes, limits, allowed, all_gaps, start.link_price, start.num_neighbours, prices)
        self.follow(codes, rounds=1)

    def release(self, codes: Codes, neighbours: int) -> None:
        """Let go of what has to leave, from some decision."""
        static, work, limits = self.problem.static, self.problem.work, self.limits
        moves.release(static, work, codes, limits, self.allowed, self.all_gaps, 0.0, neighbours, moves.UNPRICED)
        self.follow(codes, rounds=1)

    def follow(self, codes: Codes, *, rounds: int) -> None:
        """Improve a decision one gap at a time, in place, and take it if it is then the best."""
        static, work = self.problem.static, self.problem.work
        found = moves.improve(static, work, codes, self.limits, self.allowed, self.largest_first, rounds)
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
        for gap in self.largest_first[swapped[self.largest_first]][:_MAX_REBUILDS]:
            codes = decided.copy()
            codes[gap] = Code.KEEP
            moves.release(static, work, codes, limits, self.allowed, smaller, 0.0, 0, moves.UNPRICED)
            self.follow(codes, rounds=1)

    def exchange(self, most: int) -> None:
        """Change two gaps at once, in at most so many evaluations."""
        static, work = self.problem.static, self.problem.work
        codes = self.codes.copy()
        self._take(codes, moves.exchange(static, work, codes, self.limits, self.allowed, most))

    def try_windows(self, largest: int, width: int) -> None:
        """Try all codes of each few neighbours among the largest gaps."""
        static, work = self.problem.static, self.problem.work
        order = self._by_next_use(self.largest_first[:largest])
        codes = self.codes.copy()
        found = try_windows(static, work, codes, self.limits, self.allowed, order, width, _WINDOW_ROUNDS)
        if (found[0], found[1]) < (self.excess, self.time_s):
            self._take(codes, found)
            self.follow(codes.copy(), rounds=1)

    def shake(self, steps: int, parts: int, most_exchanges: int) -> None:
        """Take some releases back and repair at another place, in so many steps, a part of them at a time."""
        static, work = self.problem.static, self.problem.work
        for part in range(parts):
            codes = self.codes.copy()
            reach, slack = _SHAKES[part % len(_SHAKES)]
            moves.shake(static, work, codes, self.limits, self.allowed, steps // parts, reach, slack, part + 1)
            found = moves.improve(static, work, codes, self.limits, self.allowed, self.largest_first, 2)
            self._take(codes, found)
            self.exchange(most_exchanges)

    def anneal(self, *, anew: bool) -> None:
        """Anneal where the step is small enough, from everything on the device (`anew`) or from the best decision."""
        static, work = self.problem.static, self.problem.work
        keep = self.problem.keep_all()
        least, most = (changes * len(keep) for changes in _CHANGES_A_GAP)
        steps = min(most, _ANNEALED_OPS // (len(self.problem.trace.ops) * len(_HEATS)))
        if steps < least or self.excess > 0:
            return
        order = self._by_next_use(self.all_gaps)
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


def allowed_codes(problem: PlanningProblem) -> NDArray[np.bool_]:
    """Return which codes each gap may take."""
    allowed = np.zeros((len(problem.gaps), len(Code)), np.bool_)
    can_recompute = np.array([gap.can_recompute for gap in problem.gaps], np.bool_)
    allowed[:, Code.KEEP] = True
    allowed[:, Code.SWAP] = True
    allowed[:, Code.DISK] = problem.disk_budget_bytes > 0 and problem.host_budget_bytes < problem.plain_peak_bytes
    allowed[:, Code.RECOMPUTE] = can_recompute
    allowed[:, Code.AGAIN] = can_recompute & (problem.decision_class in ("extended", "all"))
    return allowed
