"""The lives that remain under a plan: what is swapped or recomputed leaves its address, and comes back to another.

Time is finer here than in the trace: every op of a replay is a moment of its own, so that transients of a replay share
addresses as far as they can. What an op allocates inside itself is a life of one moment; so are outputs that a replay
makes a second time while the first is still there. Versions that overwrite one another in place are one life, until the
storage is given back. The load of these lives at each moment is what `plan.validate` holds against the budget.

A parameter that was away in between is at the end of the step where the next one finds it at its beginning: these two
lives are one that runs over the end, and are placed as in [Note: across the end of a step] in `lives.py`. What crosses
there takes its place all the time, so that the load of the lives can then be above the plan's peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdelta.errors import PlanError, PoolError
from torchdelta.plan.over_end import parts_within_step
from torchdelta.pool.lives import turned
from torchdelta.pool.model import Instance, Placement, make_instance
from torchdelta.pool.solvers import solve
from torchdelta.pool.validate import check
from torchdelta.trace.model import BEFORE_STEP, versions_over_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.plan.model import Absence, Plan, Replay
    from torchdelta.trace.model import Trace

MAX_TRIES = 12


def lives_of_plan(trace: Trace, plan: Plan, *, alignment_bytes: int = 1, capacity_bytes: int | None = None) -> Instance:
    """Return the lives of a step that follows a plan.

    Args:
        trace: The step.
        plan: A valid plan of it.
        alignment_bytes: As in `make_instance`.
        capacity_bytes: As in `make_instance`.

    Raises:
        PoolError: As `make_instance`.
    """
    walk = _Walk(trace, plan)
    walk.run()
    walk.join()
    return make_instance(
        ids=walk.ids,
        starts=walk.starts,
        ends=walk.ends,
        sizes_bytes=walk.sizes_bytes,
        alignment_bytes=alignment_bytes,
        capacity_bytes=capacity_bytes,
    )


class _Walk:
    """The step moment by moment, with the life that each buffer on the device is in. Mutable."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.moment = 0
        self.ids: list[str] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.sizes_bytes: list[int] = []
        self.life_of: dict[int, int] = {}  # by buffer
        self.until: dict[int, int] = {}
        self.replays = {replay.at_op: replay for replay in plan.replays}
        num_ops = len(trace.ops)
        self.leaving: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self.returning: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self.over_end = versions_over_end(trace)
        self.first_life: dict[int, int] = {}  # by buffer, of what is there when the step begins
        self.last_life: dict[int, int] = {}  # by buffer, of what is there when it ends
        for absence in plan.absences:
            for part in parts_within_step(trace, absence, self.over_end):
                if part.action == "swap" and part.leave_op == part.return_op:
                    continue  # its memory is never free: it stays where it is
                self.leaving[part.leave_op].append(part)
                self.returning[part.return_op].append(part)
        self.deaths: list[list[int]] = [[] for _ in range(num_ops + 1)]
        for buffer in trace.buffers:
            self.deaths[buffer.death_op].append(buffer.id)

    def run(self) -> None:
        """Go through the step."""
        away = {part.buffer_id for part in self.leaving[0]}
        self._open(b.id for b in self.trace.buffers if b.birth_op == BEFORE_STEP and b.id not in away)
        self.first_life = dict(self.life_of)
        for op in self.trace.ops:
            overwritten = [id_ for id_ in self.deaths[op.index] if self._goes_on(id_, op.writes)]
            self._close(id_ for id_ in self.deaths[op.index] if id_ not in overwritten)
            expired = [id_ for id_, until in self.until.items() if until <= op.index]
            self._close(expired)
            for id_ in expired:
                del self.until[id_]
            self._close(absence.buffer_id for absence in self.leaving[op.index])
            self._open(absence.buffer_id for absence in self.returning[op.index] if absence.action == "swap")
            if op.index in self.replays:
                self._replay(self.replays[op.index])
            by_storage = {
                self.trace.buffers[id_].storage_id: self.life_of.pop(id_) for id_ in overwritten if id_ in self.life_of
            }
            for id_ in op.writes:
                buffer = self.trace.buffers[id_]
                life = by_storage.pop(buffer.storage_id, None)
                if life is None:
                    self._open([id_])
                else:
                    self.life_of[id_] = life
                    self.sizes_bytes[life] = max(self.sizes_bytes[life], buffer.size_bytes)
            for life in by_storage.values():
                self.ends[life] = self.moment
            self._inside(op.workspace_bytes, f"inside op {op.index}")
            self.moment += 1
        self.last_life = dict(self.life_of)
        self._close(list(self.life_of))

    def join(self) -> None:
        """Make one life of what a storage is at the end of the step and at the beginning of the next one."""
        gone: set[int] = set()
        for last_id, first in self.over_end.items():
            late, early = self.last_life.get(last_id), self.first_life.get(first.id)
            if late is not None and early is not None and late != early:
                self.ends[late] += self.ends[early]  # the next step's moments follow this one's
                gone.add(early)
        if not gone:
            return
        left = [life for life in range(len(self.ids)) if life not in gone]
        self.ids, self.sizes_bytes = [self.ids[life] for life in left], [self.sizes_bytes[life] for life in left]
        spans = [(self.starts[life], self.ends[life]) for life in left]
        self.starts, self.ends = turned(spans, self.sizes_bytes, self.moment)

    def _goes_on(self, id_: int, writes: tuple[int, ...]) -> bool:
        storage_id = self.trace.buffers[id_].storage_id
        return any(self.trace.buffers[written].storage_id == storage_id for written in writes)

    def _replay(self, replay: Replay) -> None:
        stays = {absence.buffer_id for absence in self.returning[replay.at_op] if absence.action == "recompute"}
        kept = {keep.buffer_id: keep.until_op for keep in replay.keeps}
        last_read = {id_: place for place, op in enumerate(replay.ops) for id_ in self.trace.ops[op].reads}
        made: set[int] = set()
        for place, index in enumerate(replay.ops):
            op = self.trace.ops[index]
            twice_bytes = sum(self.trace.buffers[id_].size_bytes for id_ in op.writes if id_ in self.life_of)
            new = [id_ for id_ in op.writes if id_ not in self.life_of]
            for id_ in new:
                storage_id = self.trace.buffers[id_].storage_id
                old = [i for i in made if self.trace.buffers[i].storage_id == storage_id]
                if old and self.trace.buffers[old[0]].death_op == index:  # in place: one life
                    life = self.life_of[id_] = self.life_of.pop(old[0])
                    self.sizes_bytes[life] = max(self.sizes_bytes[life], self.trace.buffers[id_].size_bytes)
                    made.discard(old[0])
            self._open(new)
            made.update(new)
            self._inside(op.workspace_bytes + twice_bytes, f"inside op {index} again at {self.moment}")
            self.moment += 1
            done = [id_ for id_ in made if last_read.get(id_, -1) <= place and id_ not in stays and id_ not in kept]
            self._close(done)
            made.difference_update(done)
        self.until.update(kept)

    def _inside(self, size_bytes: int, name: str) -> None:
        if size_bytes:
            self._add(name, self.moment, size_bytes)
            self.ends[-1] = self.moment + 1

    def _add(self, name: str, start: int, size_bytes: int) -> None:
        self.ids.append(name)
        self.starts.append(start)
        self.ends.append(start)
        self.sizes_bytes.append(size_bytes)

    def _open(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ not in self.life_of:
                self.life_of[id_] = len(self.ids)
                self._add(f"buffer {id_} from {self.moment}", self.moment, self.trace.buffers[id_].size_bytes)

    def _close(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            life = self.life_of.pop(id_, None)
            if life is not None:
                self.ends[life] = self.moment


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
        PoolError: It did not fit after 12 plans, or there is none for the less that it would take.
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
            raise PoolError(
                f"no plan with a footprint within {budget_bytes} bytes was found: the last one needs {footprint_bytes} "
                f"bytes, and for less {error}{advice}"
            ) from error
        if plan.header.decision_class == "saved":
            advice = "; a planner of a larger class, such as torchdelta-extended, may find one"
        instance = lives_of_plan(trace, plan, alignment_bytes=alignment_bytes, capacity_bytes=budget_bytes)
        placement = solve(instance, seed=seed)
        check(replace(instance, capacity_bytes=None), placement.offsets_bytes)
        footprint_bytes = placement.footprint_bytes
        if footprint_bytes <= budget_bytes:
            return PooledPlan(plan=plan, placement=placement, num_tries=number)
        target_bytes -= footprint_bytes - budget_bytes
    raise PoolError(
        f"no plan with a footprint within {budget_bytes} bytes was found: the last of {MAX_TRIES} plans needs "
        f"{footprint_bytes} bytes"
    )
