"""`autoswap-*`: the swap-only planner of Zhang et al. 2019 (arXiv 1903.06631), with its scores and both schedules.

Candidates are the gaps between two uses of one variable that span the peak of the load, of at least 1 MiB. They are
sorted by a score and swapped from the top until the load on paper is below the limit:

- `doa`, duration of absence: the gap's time less that of both copies;
- `aoa`, area of absence: DOA x bytes, or DOA / bytes where DOA is negative;
- `wdoa`, weighted: the sum over the gap of load - limit;
- `swdoa`, submodular weighted: greedily the largest sum of the load over the gap, which each pick lowers;
- `bo`: a weighted sum of the four, standardised, whose weights in [-1, 1] a Bayesian optimisation finds.

Scores as in the paper and its table, not as in its code (where DOA subtracts the copy out twice, and WDOA is never
set). Scheduling *stick-to-limit* is the simulator's: compute waits where the limit asks for it. *No-overhead* never
waits: the copies out follow each other from each last use on, the copies back end in time, and the load falls where it
falls (`autoswap_schedule.py`).

Our reading: all variables with two uses in the step, parameters and optimizer states included, over the end of the
step too, as the paper's view of memory blocks has it (class *all*). The delays of four and six events before a
release, which its code needs for its queue, are left out. The Bayesian optimisation is a Gaussian process of our own
(`surrogate.py`) with the published numbers: a start at each unit vector, twenty more points by upper confidence bound
with kappa 5.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.autoswap_schedule import NoOverhead, gaps_of_variables, no_overhead
from torchdelta.planners.ideal import IdealLoad, in_s, out_s, start_times_s
from torchdelta.planners.outcome import finished
from torchdelta.planners.registry import Effort, Planner, register
from torchdelta.planners.surrogate import maximize
from torchdelta.planners.tighten import NoChoiceError, tighten
from torchdelta.simulate.gaps import Gap
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["SCORES", "Score", "reduction"]

Score = Literal["doa", "aoa", "wdoa", "swdoa", "bo"]
SCORES: tuple[Score, ...] = ("doa", "aoa", "wdoa", "swdoa", "bo")

_MIN_BYTES = 2**20
_NUM_LIMITS = 96

Array = NDArray[np.float64]
Codes = NDArray[np.int8]


def _planner(score: Score) -> Planner:
    def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
        """Swap from the top of the score until the step fits, waiting where the budget asks for it.

        Raises:
            InfeasibleError: Swapping every candidate is not enough.
        """
        problem = Problem.of(trace, machine, decision_class="all")
        candidates = _Candidates(trace, machine, problem.gaps)
        if score == "bo":
            codes, least_bytes = _mixed(problem, candidates, budget_bytes)
        else:
            outcome = tighten(
                problem,
                budget_bytes,
                lambda limit: _codes(problem, candidates.top(candidates.scores(limit)[score], limit)),
            )
            codes, least_bytes = outcome.codes, outcome.least_bytes
        return finished(problem, codes, budget_bytes, planner=f"autoswap-{score}", least_bytes=least_bytes)

    return plan


for _score in SCORES:
    register(f"autoswap-{_score}")(_planner(_score))


def reduction(trace: Trace, machine: Machine, score: Score) -> NoOverhead:
    """Return the least peak that a score reaches without any waiting ("no-overhead").

    A lower limit makes the score pick more, which does not always lower the peak that follows: the limits between the
    peak and what swapping every candidate would leave on paper are tried, evenly spaced.

    Args:
        trace: A priced trace.
        machine: Whose host link carries the copies.
        score: The score.
    """
    candidates = _Candidates(trace, machine, gaps_of_variables(trace, min_size_bytes=_MIN_BYTES))
    everything = IdealLoad(trace)
    peak_bytes = everything.peak_bytes
    for gap in candidates.gaps:
        everything.leave(gap)
    best = no_overhead(trace, machine, ())
    for step in range(1, _NUM_LIMITS + 1):
        limit = peak_bytes - (peak_bytes - everything.peak_bytes) * step // _NUM_LIMITS
        orders = [candidates.scores(limit)[score]] if score != "bo" else _mixes(trace, machine, candidates, limit)
        for order in orders:
            found = no_overhead(trace, machine, candidates.chosen(order, limit))
            if found.peak_bytes < best.peak_bytes:
                best = found
    return best


class _Candidates:
    """The gaps that span the peak, and their scores."""

    def __init__(self, trace: Trace, machine: Machine, gaps: tuple[Gap, ...]) -> None:
        self._trace = trace
        self._peak = IdealLoad(trace)
        self._places = [
            place for place, gap in enumerate(gaps) if gap.size_bytes >= _MIN_BYTES and self._spans_peak(gap)
        ]
        self.gaps = tuple(gaps[place] for place in self._places)
        num_ops = len(trace.ops)
        start_s = start_times_s(trace)
        later_s = np.concatenate((start_s, start_s[-1] + start_s[1:]))
        self._bytes = np.array([gap.size_bytes for gap in self.gaps], dtype=np.float64)
        self._first = np.array([gap.last_use_op + 1 for gap in self.gaps], dtype=np.int64)
        self._end = np.array([min(gap.next_use_op, 2 * num_ops) for gap in self.gaps], dtype=np.int64)
        copies_s = [out_s(machine, gap.size_bytes) + in_s(machine, gap.size_bytes) for gap in self.gaps]
        self._doa = later_s[self._end] - later_s[self._first] - np.array(copies_s)
        self._swdoa = self._submodular()

    def _spans_peak(self, gap: Gap) -> bool:
        peak_op, num_ops = self._peak.peak_op, len(self._trace.ops)
        return gap.last_use_op < peak_op < gap.next_use_op or peak_op < gap.next_use_op - num_ops

    def scores(self, limit_bytes: int) -> dict[Score, Array]:
        """Return the four scores under a limit; larger is better."""
        load = np.concatenate((self._peak.load_bytes, self._peak.load_bytes))  # a gap may reach into the next step
        over = np.concatenate(([0.0], np.cumsum(load - float(limit_bytes))))
        return {
            "doa": self._doa,
            "aoa": np.where(self._doa >= 0, self._doa * self._bytes, self._doa / np.maximum(self._bytes, 1)),
            "wdoa": over[self._end] - over[self._first],
            "swdoa": self._swdoa,
        }

    def standardised(self, limit_bytes: int) -> Array:
        """Return the four as columns (AOA, DOA, WDOA, SWDOA) of mean 0 and deviation 1."""
        scores = self.scores(limit_bytes)
        columns = np.stack([scores["aoa"], scores["doa"], scores["wdoa"], scores["swdoa"]], axis=1)
        if not len(columns):
            return columns
        deviation = columns.std(axis=0)
        return (columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)

    def top(self, scores: Array, limit_bytes: int) -> list[int]:
        """Return who is swapped, as places in the gaps given: from the top until the load on paper is within the limit.

        Raises:
            NoChoiceError: All of them are not enough.
        """
        load, places = IdealLoad(self._trace), list[int]()
        for index in np.argsort(-scores, kind="stable"):
            if load.peak_bytes <= limit_bytes:
                break
            places.append(self._places[int(index)])
            load.leave(self.gaps[int(index)])
        if load.peak_bytes > limit_bytes:
            raise NoChoiceError
        return places

    def chosen(self, scores: Array, limit_bytes: int) -> tuple[Gap, ...]:
        """Return who is swapped, as gaps, in their order; for a limit that swapping everyone reaches."""
        places = set(self.top(scores, limit_bytes))
        return tuple(gap for place, gap in zip(self._places, self.gaps, strict=True) if place in places)

    def _submodular(self) -> Array:
        """Return minus the order in which a greedy pick by what is left of the load takes them."""
        load = np.concatenate((self._peak.load_bytes, self._peak.load_bytes)).astype(np.float64)
        left, rank = np.ones(len(self.gaps), dtype=bool), np.zeros(len(self.gaps))
        for place in range(len(self.gaps)):
            total = np.concatenate(([0.0], np.cumsum(load)))
            area = np.where(left, total[self._end] - total[self._first], -np.inf)
            pick = int(np.argmax(area))
            left[pick] = False
            rank[pick] = -place
            load[self._first[pick] : self._end[pick]] -= self._bytes[pick]
        return rank


def _codes(problem: Problem, places: list[int]) -> Codes:
    codes = problem.keep_all()
    codes[places] = Code.SWAP
    return codes


def _mixed(problem: Problem, candidates: _Candidates, budget_bytes: int) -> tuple[Codes, int]:
    """Return the best codes of a Bayesian optimisation of the weights, and the least peak that was met."""
    columns = candidates.standardised(budget_bytes)
    found: list[tuple[bool, float, int, Codes]] = []

    def value(weights: Array) -> float:
        order = columns @ weights
        outcome = tighten(problem, budget_bytes, lambda limit: _codes(problem, candidates.top(order, limit)))
        score = problem.score(outcome.codes, budget_bytes)
        found.append((score.is_feasible, score.time_s, outcome.least_bytes, outcome.codes))
        return -score.time_s if score.is_feasible else -10 * score.time_s

    maximize(value, dimensions=4)
    feasible = [entry for entry in found if entry[0]]
    best = min(feasible or found, key=lambda entry: entry[1] if entry[0] else entry[2])
    return best[3], min(entry[2] for entry in found)


def _mixes(trace: Trace, machine: Machine, candidates: _Candidates, limit_bytes: int) -> list[Array]:
    """Return the mixes that a Bayesian optimisation tries to get the least peak without waiting."""
    columns = candidates.standardised(limit_bytes)
    tried: list[Array] = []

    def value(weights: Array) -> float:
        tried.append(columns @ weights)
        return -float(no_overhead(trace, machine, candidates.chosen(tried[-1], limit_bytes)).peak_bytes)

    maximize(value, dimensions=4)
    return tried
