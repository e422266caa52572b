"""The best plan of the class *saved* for a step with few candidates: every combination of decisions is simulated."""

from itertools import product

import numpy as np

from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem

MAX_COMBINATIONS = 3**10


def combinations(problem, *, disk=False):
    """Return how many decisions there are, and an iterator over all of them."""
    swaps = (Code.KEEP, Code.SWAP, Code.DISK) if disk else (Code.KEEP, Code.SWAP)
    actions = [(*swaps, Code.RECOMPUTE) if gap.can_recompute else swaps for gap in problem.gaps]
    number = int(np.prod([len(codes) for codes in actions], dtype=float))
    return number, (np.array(codes, np.int8) for codes in product(*actions))


def best_of_all(trace, machine, budget_bytes, *, disk=False, at_most=MAX_COMBINATIONS, options=None):
    """Return the least time of any decision that fits and its simulation; infinite and None if none does.

    None instead of both where there are too many decisions to try.
    """
    problem = PlanningProblem.of(trace, machine, min_size_bytes=1, options=options)
    number, every = combinations(problem, disk=disk)
    if number > at_most:
        return None
    best, best_s = None, float("inf")
    for codes in every:
        score = problem.score(codes, budget_bytes)
        if score.is_feasible and score.time_s < best_s:
            best, best_s = codes, score.time_s
    return best_s, None if best is None else problem.simulation(best, budget_bytes)
