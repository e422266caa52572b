"""What fits: the least budget at which a planner finds a plan, and the largest batch at a budget and a slowdown.

Both ask a planner again and again and take its word: better planners fit more. Both search by halves, as if what fits
at some budget (or batch) fitted at every larger budget (smaller batch); a planner that is erratic costs some of what it
could have had, never a wrong answer. Deterministic.
"""

from collections.abc import Callable

import msgspec

from torchdelta.bounds.lp_bound import least_peak_bound
from torchdelta.errors import InfeasibleError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.registry import Effort, Planner
from torchdelta.trace.model import Trace, peak

__all__ = ["Batch", "BatchSearch", "LeastBudget", "least_budget"]

_MAX_BATCH = 2**40  # where every batch fits, the search has to end: a byte a sample fills no machine there is


class LeastBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the search for a least budget.

    Attributes:
        budget_bytes: The least budget at which the planner found a plan.
        plan: That plan.
        lower_bound_bytes: No plan of the class *saved* holds less, whoever makes it.
    """

    budget_bytes: int
    plan: Plan
    lower_bound_bytes: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was tried.

    Attributes:
        size: Samples.
        sample_time_s: Seconds a sample under the plan; infinite if no plan was found.
    """

    size: int
    sample_time_s: float


def least_budget(
    trace: Trace, machine: Machine, planner: Planner, effort: Effort = "fast", *, precision: int = 500
) -> LeastBudget:
    """Return the least budget at which a planner finds a plan.

    Args:
        trace: A priced trace.
        machine: What it was priced for.
        planner: Who plans.
        effort: How long it may think, each time.
        precision: It is found to one part in so many of itself.
    """
    bound_bytes = least_peak_bound(trace)
    high_bytes = max(peak(trace, with_workspace=True).size_bytes, 1)
    best = planner(trace, machine, high_bytes, effort)
    low_bytes = bound_bytes - 1
    guess_bytes: int | None = min(bound_bytes, high_bytes)
    while high_bytes - low_bytes > max(high_bytes // precision, 1) or guess_bytes == bound_bytes:
        middle_bytes = (low_bytes + high_bytes) // 2 if guess_bytes is None else guess_bytes
        try:
            best, high_bytes, guess_bytes = planner(trace, machine, middle_bytes, effort), middle_bytes, None
        except InfeasibleError as error:
            low_bytes, named_bytes = middle_bytes, error.least_budget_bytes
            # What the planner names as its least is worth a try, once, where it narrows the search.
            is_new = named_bytes is not None and low_bytes < named_bytes < high_bytes and guess_bytes is not None
            guess_bytes = named_bytes if is_new else None
        if high_bytes == bound_bytes == middle_bytes and best.header.decision_class != "saved":
            low_bytes = _widest_op_bytes(trace) - 1  # the bound is of the class saved: look below it
    return LeastBudget(budget_bytes=high_bytes, plan=best, lower_bound_bytes=bound_bytes)


def _widest_op_bytes(trace: Trace) -> int:
    """Return what the widest op has around it: no plan of any class holds less."""
    widest_bytes = 0
    for op in trace.ops:
        storages = {trace.buffers[id_].storage_id: trace.buffers[id_].size_bytes for id_ in (*op.reads, *op.writes)}
        widest_bytes = max(widest_bytes, sum(storages.values()) + op.workspace_bytes)
    return widest_bytes


class BatchSearch:
    """Finds largest batches, and remembers every batch that was tried. Mutable."""

    def __init__(self, sample_time_s: Callable[[int], float]) -> None:
        """Search with a function from a batch to its seconds a sample, infinite where nothing fits."""
        self._sample_time_s = sample_time_s
        self._known: dict[int, float] = {}

    def try_batch(self, size: int) -> Batch:
        """Return what a batch costs, from memory if it was tried before."""
        if size not in self._known:
            self._known[size] = self._sample_time_s(size)
        return Batch(size=size, sample_time_s=self._known[size])

    def largest(self, limit_s: float, *, first: int = 1) -> Batch | None:
        """Return the largest batch at no more than so many seconds a sample; None if not even `first` is."""

        def fits(size: int) -> bool:
            return self.try_batch(size).sample_time_s <= limit_s and self.try_batch(size).sample_time_s < float("inf")

        if not fits(first):
            return None
        good, bad = first, 2 * first
        while bad <= _MAX_BATCH and fits(bad):
            good, bad = bad, 2 * bad
        if bad > _MAX_BATCH:
            return self.try_batch(good)
        # One in 200 is enough of an answer for a large batch.
        while bad - good > max(1, good // 200):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return self.try_batch(good)
