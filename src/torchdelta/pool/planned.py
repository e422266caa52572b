"""The lives that remain under a plan: what is swapped or recomputed leaves its address, and comes back to another.

Moments are those of `plan/walk.py`, where every op of a replay is one, so that transients of a replay share addresses
as far as they can. What an op allocates inside itself is a life of one moment; so are outputs that a replay
makes a second time while the first is still there. Versions that overwrite one another in place are one life, until the
storage is given back. The load of these lives at each moment is what `plan.validate` holds against the budget.

A parameter that was away in between is at the end of the step where the next one finds it at its beginning, and so is
a storage that outlives the step and that the next one still finds: such two lives are one that runs over the end, and
are placed as in [Note: across the end of a step] in `lives.py`. What crosses there takes its place all the time, so
that the load of the lives can then be above the plan's peak.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdelta.errors import InfeasibleError, PlanError
from torchdelta.plan.walk import Walk
from torchdelta.pool.lives import pair_over_end, rotate_step
from torchdelta.pool.model import Instance, Placement, make_instance
from torchdelta.pool.solvers import solve
from torchdelta.pool.validate import check
from torchdelta.trace.model import BEFORE_STEP, storage_versions, versions_over_end
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.plan.model import Plan
    from torchdelta.plan.walk import Moment
    from torchdelta.trace.model import Trace

MAX_TRIES = 12


def lives_of_plan(trace: Trace, plan: Plan, *, alignment_bytes: int = 1, capacity_bytes: int | None = None) -> Instance:
    """Return the lives of a step that follows a plan.

    Raises:
        PoolError: As `make_instance`.
    """
    lives = _Lives(trace)
    for moment in Walk(trace, plan).moments():
        lives.add(moment)
    lives.join()
    return make_instance(
        ids=lives.ids,
        starts=lives.starts,
        ends=lives.ends,
        sizes_bytes=lives.sizes_bytes,
        alignment_bytes=alignment_bytes,
        capacity_bytes=capacity_bytes,
    )


class _Lives:
    """The lives, and which of them each buffer on the device is in. Mutable."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.moment = 0
        self.ids: list[str] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.sizes_bytes: list[int] = []
        self.life_of: dict[int, int] = {}  # by buffer
        self.first_life: dict[int, int] = {}  # by buffer, of what is there when the step begins

    def add(self, moment: Moment) -> None:
        """Go on by one moment."""
        self._close(moment.freed)
        self._open(moment.taken)
        for old, new in moment.replaced:
            life = self.life_of[new] = self.life_of.pop(old)
            self.sizes_bytes[life] = max(self.sizes_bytes[life], self.trace.buffers[new].size_bytes)
            if not self.moment and not moment.is_replay:
                self.first_life[old] = life
        if not self.moment:
            found = (id_ for id_ in self.life_of if self.trace.buffers[id_].birth_op == BEFORE_STEP)
            self.first_life |= {id_: self.life_of[id_] for id_ in found}
        again = f" again at {self.moment}" if moment.is_replay else ""
        if moment.inside_bytes:
            self._add(f"inside op {moment.op}{again}", moment.inside_bytes)
            self.ends[-1] = self.moment + 1
        self.moment += 1

    def join(self) -> None:
        """End the step: one life of what a storage is at its end and at the beginning of the next one."""
        last_life = dict(self.life_of)
        self._close(list(self.life_of))
        gone: set[int] = set()
        for last_id, first in versions_over_end(self.trace).items():
            late, early = last_life.get(last_id), self.first_life.get(first.id)
            if late is not None and early is not None and late != early:
                self.ends[late] += self.ends[early]  # the next step's moments follow this one's
                gone.add(early)
        gone |= self._join_others(last_life)
        left = [life for life in range(len(self.ids)) if life not in gone]
        self.ids, self.sizes_bytes = [self.ids[life] for life in left], [self.sizes_bytes[life] for life in left]
        spans = [(self.starts[life], self.ends[life]) for life in left]
        self.starts, self.ends = rotate_step(spans, self.sizes_bytes, self.moment)

    def _join_others(self, last_life: dict[int, int]) -> set[int]:
        """Join storages that outlive the step with those that are left over from the step before; return the latter."""
        buffers, num_ops = self.trace.buffers, len(self.trace.ops)
        versions = storage_versions(self.trace)
        before = {storage for storage, each in versions.items() if each[0].birth_op == BEFORE_STEP}
        after = {storage for storage, each in versions.items() if each[-1].death_op == num_ops}
        new = {life for id_, life in last_life.items() if buffers[id_].storage_id not in before}
        old = {life for id_, life in self.first_life.items() if buffers[id_].storage_id not in after}
        left_over: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for life in old:
            left_over[self.sizes_bytes[life]].append((self.ends[life], life))
        outliving = [(self.starts[life], life, self.sizes_bytes[life]) for life in new]
        gone: set[int] = set()
        for late, (end, early) in pair_over_end(outliving, left_over).items():
            if end <= self.starts[late]:
                self.ends[late] += end
                gone.add(early)
            else:  # two places that take turns
                self.starts[late] = 0
                self.ends[early] = self.moment
        return gone

    def _add(self, name: str, size_bytes: int) -> None:
        self.ids.append(name)
        self.starts.append(self.moment)
        self.ends.append(self.moment)
        self.sizes_bytes.append(size_bytes)

    def _open(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self.life_of[id_] = len(self.ids)
            self._add(f"buffer {id_} from {self.moment}", self.trace.buffers[id_].size_bytes)

    def _close(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self.ends[self.life_of.pop(id_)] = self.moment


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledPlan:
    """A plan whose footprint is within a budget.

    Attributes:
        plan: The plan; the budget in its header may be less than what was asked for.
        placement: Where its lives are placed.
        num_tries: Plans that were made.
    """

    plan: Plan
    placement: Placement
    num_tries: int


def plan_within_footprint(
    trace: Trace,
    budget_bytes: int,
    make_plan: Callable[[int], Plan],
    *,
    alignment_bytes: int = 1,
    seed: int = 0,
) -> PooledPlan:
    """Make a plan whose lives can be placed within a budget.

    A plan bounds the load; what fragmentation adds is taken off the budget of the next one, until it fits.

    Args:
        trace: The step.
        budget_bytes: What the footprint must not pass.
        make_plan: Makes a plan for a budget, or raises what a planner raises.
        alignment_bytes: Every address is to be a multiple of this.
        seed: Of the solver.

    Raises:
        PlanError: There is no plan for the budget itself.
        InfeasibleError: It did not fit after 12 plans, or there is none for the less that it would take.
    """
    target_bytes = budget_bytes
    footprint_bytes = 0
    advice = ""
    for number in range(1, MAX_TRIES + 1):
        try:
            plan = make_plan(target_bytes)
        except PlanError as error:
            if number == 1:
                raise
            raise InfeasibleError(
                f"no plan with a footprint within {format_bytes(budget_bytes)} was found: the last one needs "
                f"{format_bytes(footprint_bytes)}, and for less {error}{advice}",
                least_budget_bytes=None,
            ) from error
        if plan.header.decision_class == "saved":
            advice = "; a plan of a larger class (--class extended) may fit"
        instance = lives_of_plan(trace, plan, alignment_bytes=alignment_bytes, capacity_bytes=budget_bytes)
        placement = solve(instance, seed=seed)
        check(replace(instance, capacity_bytes=None), placement.offsets_bytes)
        footprint_bytes = placement.footprint_bytes
        if footprint_bytes <= budget_bytes:
            return PooledPlan(plan=plan, placement=placement, num_tries=number)
        target_bytes -= footprint_bytes - budget_bytes
    raise InfeasibleError(
        f"no plan with a footprint within {format_bytes(budget_bytes)} was found: the last of {MAX_TRIES} plans needs "
        f"{format_bytes(footprint_bytes)}",
        least_budget_bytes=None,
    )
