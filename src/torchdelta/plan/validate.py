"""The invariants of a plan, checked by liveness alone: no prices, no simulator, no planner.

What must hold, beside ids and numbers in range:

1.  A buffer leaves after a use of it and is there at each use in between: an absence begins right after its last use or
    later, ends by its next one, and no op or replay reads the buffer while it is away.
2.  A recomputed buffer is written by a replay at the op at which it returns, and everything that a replay reads is on
    the device or made earlier in the same replay.
3.  A replay runs only ops that are recomputable.
4.  At every op, and at every op of a replay, the bytes on the device, workspaces included, are within the budget.
5.  What is swapped to the host and to the disk fits there, if a machine is given.
6.  What is away over the end of the step is what the next step begins with: the last version of a storage that is alive
    at both ends, at the same size ([Note: over the end] in `plan/model.py`). All of the above holds of the step that is
    repeated: such a buffer is away, and held elsewhere, at the beginning too.

Linear in ops, reads and what the replays run.
"""

from collections import Counter
from collections.abc import Iterable

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import FORMAT_NAME, Absence, Plan, Replay
from torchdelta.plan.over_end import parts_within_step
from torchdelta.trace.model import BEFORE_STEP, Trace, versions_over_end
from torchdelta.units import format_bytes

__all__ = ["find_fault", "validate"]


def validate(trace: Trace, plan: Plan, machine: Machine | None = None) -> None:
    """Check a plan against its trace, and against the limits of a machine's host and disk if one is given.

    Raises:
        PlanError: With one line that says what is wrong, and where.
    """
    fault = find_fault(trace, plan, machine)
    if fault is not None:
        raise PlanError(fault)


def find_fault(trace: Trace, plan: Plan, machine: Machine | None = None) -> str | None:
    """Return what is wrong first, None if the plan is valid."""
    return (
        _header_fault(trace, plan)
        or _absence_fault(trace, plan)
        or _Walk(trace, plan).fault()
        or (_tier_fault(trace, plan, machine) if machine is not None else None)
    )


def _tier_fault(trace: Trace, plan: Plan, machine: Machine) -> str | None:
    """Add up what each tier holds: a buffer from the end of its last use until its next one."""
    num_ops = len(trace.ops)
    for tier, limit_bytes in (("host", machine.host_memory_bytes), ("disk", machine.disk_bytes)):
        swaps = [absence for absence in plan.absences if absence.action == "swap" and absence.tier == tier]
        if swaps and tier == "disk" and machine.disk_write_bytes_per_s <= 0:
            return f"the plan swaps to the disk, and machine {machine.name} has none"
        changes: Counter[int] = Counter()
        for absence in swaps:
            size_bytes = trace.buffers[absence.buffer_id].size_bytes
            changes[absence.last_use_op + 1] += size_bytes
            if absence.next_use_op < num_ops:
                changes[absence.next_use_op + 1] -= size_bytes
            else:  # there already when the step begins
                changes[0] += size_bytes
                changes[absence.next_use_op - num_ops + 1] -= size_bytes
        held_bytes = 0
        for op in sorted(changes):
            held_bytes += changes[op]
            if limit_bytes is not None and held_bytes > limit_bytes:
                return (
                    f"at op {op} the {tier} would hold {format_bytes(held_bytes)} ({held_bytes} bytes), "
                    f"{held_bytes - limit_bytes} bytes more than machine {machine.name} has there"
                )
    return None


def _header_fault(trace: Trace, plan: Plan) -> str | None:
    header = plan.header
    if header.format != FORMAT_NAME:
        return f"the plan's format is {header.format!r}, not {FORMAT_NAME!r}"
    if (header.num_ops, header.num_buffers) != (len(trace.ops), len(trace.buffers)):
        return (
            f"the plan belongs to another trace: it has {header.num_ops} ops and {header.num_buffers} buffers, this "
            f"trace {len(trace.ops)} and {len(trace.buffers)}"
        )
    if [replay.at_op for replay in plan.replays] != sorted({replay.at_op for replay in plan.replays}):
        return "the plan's replays are not in order, or two are at one op"
    for replay in plan.replays:
        if not 0 <= replay.at_op < len(trace.ops) or not all(0 <= op < replay.at_op for op in replay.ops):
            return f"the replay at op {replay.at_op} runs ops that the step does not have before it"
    return None


def _absence_fault(trace: Trace, plan: Plan) -> str | None:
    num_ops = len(trace.ops)
    over_end = versions_over_end(trace)
    parts: list[Absence] = []
    for absence in plan.absences:
        if not 0 <= absence.buffer_id < len(trace.buffers):
            return f"the plan names buffer {absence.buffer_id}, which the trace does not have"
        buffer = trace.buffers[absence.buffer_id]
        where = _where(absence)
        in_order = absence.last_use_op < absence.leave_op <= absence.return_op <= absence.next_use_op
        if not in_order or not max(buffer.birth_op, 0) <= absence.last_use_op < num_ops:
            return f"{where}, but its uses around that are ops {absence.last_use_op} and {absence.next_use_op}"
        if absence.next_use_op < num_ops:
            if absence.next_use_op > buffer.death_op:
                return f"{where}, but dies at op {buffer.death_op}"
        elif absence.action != "swap":
            return f"{where}, over the end of the step: only a swap brings it back"
        elif buffer.id not in over_end:
            return f"{where}, over the end of the step, but the next step does not begin with it"
        elif absence.next_use_op - num_ops > min(over_end[buffer.id].death_op, num_ops - 1):
            return f"{where}, but is written over at op {over_end[buffer.id].death_op} of the next step"
        parts += parts_within_step(trace, absence, over_end)
    ends: dict[int, int] = {}
    for part in sorted(parts, key=lambda part: (part.buffer_id, part.leave_op)):
        if part.leave_op < ends.get(part.buffer_id, 0):
            return f"{_where(part)} and has not come back from the absence before"
        ends[part.buffer_id] = part.return_op
    return None


def _where(absence: Absence) -> str:
    return f"buffer {absence.buffer_id} is away at ops {absence.leave_op} to {absence.return_op}"


class _Walk:
    """The step op by op, with the set of buffers on the device. Mutable."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace, self.plan = trace, plan
        num_ops = len(trace.ops)
        self.leaving: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self.returning: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self.used_bytes = 0
        self.here: set[int] = set()
        self.until: dict[int, int] = {}  # what a replay keeps, and for how long
        self.away: set[int] = set()  # by an absence
        over_end = versions_over_end(trace)
        for absence in plan.absences:
            for part in parts_within_step(trace, absence, over_end):
                self.leaving[part.leave_op].append(part)
                self.returning[part.return_op].append(part)
        self.replays = {replay.at_op: replay for replay in plan.replays}
        self.deaths: list[list[int]] = [[] for _ in range(num_ops + 1)]
        for buffer in trace.buffers:
            self.deaths[buffer.death_op].append(buffer.id)

    def fault(self) -> str | None:
        """Return what is wrong first, None if nothing is."""
        self._add(buffer.id for buffer in self.trace.buffers if buffer.birth_op == BEFORE_STEP)
        for op in self.trace.ops:
            # What this very op writes over is there until it runs: a replay before it finds it.
            written = {self.trace.buffers[id_].storage_id for id_ in op.writes}
            dying = self.deaths[op.index]
            overwritten = [i for i in dying if i in op.reads or self.trace.buffers[i].storage_id in written]
            self._remove(set(dying).difference(overwritten))
            self._remove([id_ for id_, until in self.until.items() if until <= op.index])
            self.until = {id_: until for id_, until in self.until.items() if until > op.index}
            self._remove(absence.buffer_id for absence in self.leaving[op.index])
            self.away.difference_update(absence.buffer_id for absence in self.returning[op.index])
            self.away.update(a.buffer_id for a in self.leaving[op.index] if a.return_op > op.index)
            self._add(absence.buffer_id for absence in self.returning[op.index] if absence.action == "swap")
            fault = self._replay_fault(op.index) if op.index in self.replays else None
            if fault is not None:
                return fault
            for absence in self.returning[op.index]:
                if absence.action == "recompute" and absence.buffer_id not in self.here:
                    return f"buffer {absence.buffer_id} returns at op {op.index}, but no replay there writes it"
            for id_ in op.reads:
                if id_ not in self.here:
                    return f"op {op.index} ({op.name}) reads buffer {id_}, which is not on the device"
            self._remove(overwritten)
            self._add(op.writes)
            fault = self._budget_fault(op.workspace_bytes, f"at op {op.index} ({op.name})")
            if fault is not None:
                return fault
        return None

    def _replay_fault(self, at_op: int) -> str | None:
        replay: Replay = self.replays[at_op]
        stays = {absence.buffer_id for absence in self.returning[at_op] if absence.action == "recompute"}
        kept = {keep.buffer_id: keep.until_op for keep in replay.keeps}
        last_read = {id_: place for place, op in enumerate(replay.ops) for id_ in self.trace.ops[op].reads}
        made: set[int] = set()
        for place, index in enumerate(replay.ops):
            op = self.trace.ops[index]
            where = f"the replay of op {index} ({op.name}) before op {at_op}"
            if not op.recomputable:
                return f"{where} repeats an op that is not known to give the same bits"
            # Statistics that the op itself brings up to date: the runtime gives a replay scratch in their place.
            own = {self.trace.buffers[i].storage_id for i in op.writes if self.trace.buffers[i].kind == "constant"}
            for id_ in op.reads:
                # What the step found and has overwritten since is put back by the runtime for the replay.
                found = self.trace.buffers[id_].birth_op == BEFORE_STEP and id_ not in self.away
                if id_ not in self.here and not found and self.trace.buffers[id_].storage_id not in own:
                    return f"{where} reads buffer {id_}, which is not on the device"
            twice = [id_ for id_ in op.writes if id_ in self.here]
            new = [id_ for id_ in op.writes if id_ not in self.here]
            written = {self.trace.buffers[id_].storage_id for id_ in new}
            over = [i for i in made if self.trace.buffers[i].death_op == index]
            over = [i for i in over if self.trace.buffers[i].storage_id in written]
            self._remove(over)  # in place: its memory is the new version's
            made.difference_update(over)
            self._add(new)
            made.update(new)
            twice_bytes = sum(self.trace.buffers[id_].size_bytes for id_ in twice)
            fault = self._budget_fault(op.workspace_bytes + twice_bytes, f"in {where}")
            if fault is not None:
                return fault
            done = [id_ for id_ in made if last_read.get(id_, -1) <= place and id_ not in stays and id_ not in kept]
            self._remove(done)
            made.difference_update(done)
        self.until.update(kept)
        return None

    def _add(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ not in self.here:
                self.here.add(id_)
                self.used_bytes += self.trace.buffers[id_].size_bytes

    def _remove(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ in self.here:
                self.here.discard(id_)
                self.used_bytes -= self.trace.buffers[id_].size_bytes

    def _budget_fault(self, extra_bytes: int, where: str) -> str | None:
        over_bytes = self.used_bytes + extra_bytes - self.plan.header.budget_bytes
        if over_bytes <= 0:
            return None
        return f"the budget of {format_bytes(self.plan.header.budget_bytes)} is passed by {over_bytes} bytes {where}"
