"""`autoswap-*`: the swap-only planner of Zhang et al. 2019 (arXiv 1903.06631), with its scores.

Candidates are the gaps between two uses of one variable that span the peak of the load, of at least 1 MiB. They are
sorted by a score and swapped from the top until the load on paper is below the limit:

- `doa`, duration of absence: the gap's time less that of both copies;
- `aoa`, area of absence: DOA x bytes, or DOA / bytes where DOA is negative;
- `wdoa`, weighted: the sum over the gap of load - limit;
- `swdoa`, submodular weighted: greedily the largest sum of the load over the gap, which each pick lowers.

Left out is the weighted sum of the four that the paper finds offline, by Bayesian optimisation.

Scores as in the paper and its table, not as in its code (where DOA subtracts the copy out twice, and WDOA is never
set). Scheduling *stick-to-limit* is the simulator's: compute waits where the limit asks for it.

Our reading: all variables with two uses in the step, parameters and optimizer states included, over the end of the
step too, as the paper's view of memory blocks has it (class *all*). The delays of four and six events before a
release, which its code needs for its queue, are left out.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import feasible_plan
from torchdelta.planners.literature.ideal import IdealLoad, in_s, out_s, start_times_s
from torchdelta.planners.literature.lower_limit import NoChoiceError, choose_within_budget
from torchdelta.planners.registry import Effort, Planner, register
from torchdelta.simulate.gaps import Gap
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["MIN_BYTES", "SCORES", "Candidates", "Score"]

Score = Literal["doa", "aoa", "wdoa", "swdoa"]
SCORES: tuple[Score, ...] = ("doa", "aoa", "wdoa", "swdoa")

MIN_BYTES = 2**20
"""Smaller variables stay."""

Array = NDArray[np.float64]
Codes = NDArray[np.int8]


def _planner(score: Score) -> Planner:
    def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
        """Swap from the top of the score until the step fits, waiting where the budget asks for it."""
        problem = PlanningProblem.of(trace, machine, decision_class="all")
        candidates = Candidates(trace, machine, problem.gaps)
        found = choose_within_budget(
            problem,
            budget_bytes,
            lambda limit: _codes(problem, candidates.top(candidates.scores(limit)[score], limit)),
        )
        name = f"autoswap-{score}"
        return feasible_plan(problem, found.codes, budget_bytes, planner=name, least_bytes=found.least_bytes)

    return plan


for _score in SCORES:
    register(f"autoswap-{_score}", "all")(_planner(_score))


class Candidates:
    """The gaps that span the peak, and their scores."""

    def __init__(self, trace: Trace, machine: Machine, gaps: tuple[Gap, ...]) -> None:
        """Score those of some gaps that span the peak of the plain load and hold at least `MIN_BYTES`."""
        self._trace = trace
        self._peak = IdealLoad(trace)
        self._places = [
            place for place, gap in enumerate(gaps) if gap.size_bytes >= MIN_BYTES and self._spans_peak(gap)
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

    def top(self, scores: Array, limit_bytes: int) -> list[int]:
        """Return what is swapped, as places in these gaps: from the top until the load on paper is within the limit.

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

    def chosen(self, score: Score, limit_bytes: int) -> tuple[Gap, ...]:
        """Return what is swapped, as gaps, in their order; for a limit that swapping all of them reaches."""
        places = set(self.top(self.scores(limit_bytes)[score], limit_bytes))
        return tuple(gap for place, gap in zip(self._places, self.gaps, strict=True) if place in places)

    def _submodular(self) -> Array:
        """Return minus the order in which a greedy pick by what is left of the load takes them."""
        load = self._peak.load_bytes.astype(np.float64)
        left, rank = np.ones(len(self.gaps), dtype=bool), np.zeros(len(self.gaps))
        for place in range(len(self.gaps)):
            total = np.concatenate(([0.0], np.cumsum(np.concatenate((load, load)))))
            area = np.where(left, total[self._end] - total[self._first], -np.inf)
            pick = int(np.argmax(area))
            left[pick] = False
            rank[pick] = -place
            first, end = self._first[pick], self._end[pick]
            load[first:end] -= self._bytes[pick]
            load[: max(0, end - len(load))] -= self._bytes[pick]  # in the next step
        return rank


def _codes(problem: PlanningProblem, places: list[int]) -> Codes:
    codes = problem.keep_all()
    codes[places] = Code.SWAP
    return codes
