"""A choice made under a limit that is lowered until the simulator agrees that the plan holds the budget.

The planners of the literature count memory in their own, simpler ways: transients of replays, swap-ins that must come
early and copies that are still under way fall outside. So a choice within the budget may make a plan that is not. Each
is asked again for a little less, a fixed number of times.
"""

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchdelta.simulate.problem import PlanningProblem

__all__ = ["Choose", "Chosen", "NoChoiceError", "choose_within_budget"]

_MAX_LIMITS = 10
"""So many limits, each lower than the one before, are tried for a plan."""

_MAX_LIMITS_FOR_ERROR = 4
"""So many limits above the budget are tried for the least budget that the error names."""

Codes = NDArray[np.int8]
Choose = Callable[[int], Codes]
"""From a limit in bytes to one code a gap; raises `NoChoiceError`."""


class NoChoiceError(Exception):
    """A planner has nothing left to choose under a limit. Caught by `choose_within_budget`; never reaches a user."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen in the end.

    Attributes:
        codes: Those that hold the budget; if none do, those with the least peak.
        least_bytes: The least peak that any choice had.
    """

    codes: Codes
    least_bytes: int


def choose_within_budget(problem: PlanningProblem, budget_bytes: int, choose: Choose) -> Chosen:
    """Choose with the limit at the budget, then below it by half of what the simulated plan passed it, and again."""
    best = problem.keep_all()
    score = problem.score(best, budget_bytes)
    least_bytes, limit_bytes, largest_bytes = score.peak_bytes, budget_bytes, score.peak_bytes
    if score.is_feasible:
        return Chosen(codes=best, least_bytes=least_bytes)
    for _ in range(_MAX_LIMITS):
        try:
            codes = choose(limit_bytes)
        except NoChoiceError:
            break
        score = problem.score(codes, budget_bytes)
        if score.peak_bytes < least_bytes:
            best, least_bytes = codes, score.peak_bytes
        if score.is_feasible:
            return Chosen(codes=codes, least_bytes=least_bytes)
        limit_bytes -= max(score.excess_bytes // 2, budget_bytes // 200, 1)
    # Nothing fits. What would: larger limits, by halves, for the error to name the least budget.
    low_bytes, high_bytes = budget_bytes, largest_bytes
    for _ in range(_MAX_LIMITS_FOR_ERROR):
        middle_bytes = (low_bytes + high_bytes) // 2
        try:
            codes = choose(middle_bytes)
        except NoChoiceError:
            low_bytes = middle_bytes
            continue
        high_bytes = middle_bytes
        # Where it may not wait for memory the simulator shows the least that these codes need.
        peak_bytes = problem.score(codes, middle_bytes).peak_bytes
        if peak_bytes < least_bytes:
            best, least_bytes = codes, peak_bytes
    return Chosen(codes=best, least_bytes=least_bytes)
