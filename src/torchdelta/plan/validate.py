"""The invariants of a plan, checked by liveness alone: no prices, no simulator, no planner.

What must hold, beside ids and numbers in range:

1.  A buffer leaves after a use of it and is there at each use in between: an absence begins right after its last use or
    later, ends by its next one, and no op or replay reads the buffer while it is away, or before compute has waited for
    its copy in. Its memory is free after its copy out was queued, and the next copy out follows on the one in, or on
    the replay, before. A buffer that is dropped after a swap leaves after compute has waited for its copy in.
2.  A recomputed buffer is written by a replay at the op at which it returns, and everything that a replay reads is on
    the device or made earlier in the same replay.
3.  A replay runs only ops that are recomputable, and keeps only what it makes.
4.  At every op, and at every op of a replay, the bytes on the device, workspaces included, are within the budget.
5.  What is swapped to the host and to the disk fits there, if a machine is given.
6.  What is away over the end of the step is what the next step begins with: the last version of a storage that is alive
    at both ends, at the same size ([Note: over the end] in `plan/model.py`). All of the above holds of the step that is
    repeated: such a buffer is away, and held elsewhere, at the beginning too.

What a plan means for memory is `plan/walk.py`. Linear in ops, reads and what the replays run.
"""

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import FORMAT_NAME, Absence, Plan, Replay, TierName
from torchdelta.plan.over_end import parts_within_step
from torchdelta.plan.walk import Moment, Walk, tier_load
from torchdelta.trace.model import Trace, versions_over_end
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
        or _walk_fault(trace, plan)
        or (_tier_fault(trace, plan, machine) if machine is not None else None)
    )


def _tier_fault(trace: Trace, plan: Plan, machine: Machine) -> str | None:
    """Compare what each tier holds with what it may."""
    tiers: tuple[tuple[TierName, int | None], ...]
    tiers = (("host", machine.host_memory_bytes), ("disk", machine.disk_bytes))
    for tier, limit_bytes in tiers:
        swaps = [absence for absence in plan.absences if absence.action == "swap" and absence.tier == tier]
        if swaps and tier == "disk" and machine.disk_write_bytes_per_s <= 0:
            return f"the plan swaps to the disk, and machine {machine.name} has none"
        for op, held_bytes in enumerate(tier_load(trace, swaps, tier)):
            if limit_bytes is not None and held_bytes > limit_bytes:
                return (
                    f"at op {op} the {tier} would hold {format_bytes(held_bytes)}, "
                    f"{format_bytes(held_bytes - limit_bytes)} more than machine {machine.name} has there"
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
        fault = _keeps_fault(trace, replay)
        if fault is not None:
            return fault
    return None


def _keeps_fault(trace: Trace, replay: Replay) -> str | None:
    made = {id_ for op in replay.ops for id_ in trace.ops[op].writes}
    for keep in replay.keeps:
        if keep.buffer_id not in made:
            return f"the replay at op {replay.at_op} keeps buffer {keep.buffer_id}, which it does not make"
        if not replay.at_op < keep.until_op <= len(trace.ops):
            return f"the replay at op {replay.at_op} keeps buffer {keep.buffer_id} until op {keep.until_op}"
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
        if absence.action == "swap" and not absence.last_use_op <= absence.queued_op < min(absence.leave_op, num_ops):
            return f"{where}, but its copy out is queued after op {absence.queued_op}"
        if not 0.0 <= absence.carried_s < float("inf") or (absence.carried_s and absence.next_use_op < num_ops):
            return f"{where}, but its copy out is said to take {absence.carried_s} seconds of the next step"
        if absence.next_use_op < num_ops:
            if absence.next_use_op > buffer.death_op:
                return f"{where}, but dies at op {buffer.death_op}"
        elif absence.action != "swap":
            return f"{where}, over the end of the step: only a swap brings it back"
        elif buffer.id not in over_end:
            return f"{where}, over the end of the step, but the next step does not begin with it"
        elif absence.next_use_op - num_ops > min(over_end[buffer.id].death_op, num_ops - 1):
            return f"{where}, but is overwritten at op {over_end[buffer.id].death_op} of the next step"
        parts += parts_within_step(trace, absence, over_end)
    ends: dict[int, Absence] = {}
    for part in sorted(parts, key=lambda part: (part.buffer_id, part.leave_op, part.return_op)):
        before = ends.get(part.buffer_id)
        if before is not None and part.leave_op < before.return_op:
            return f"{_where(part)} and has not come back from the absence before"
        if before is not None and part.action == "swap":
            is_swap = before.action == "swap"
            if part.queued_op < (before.next_use_op if is_swap else before.return_op):
                since = "compute has waited for the copy in before" if is_swap else "the replay before has made it"
                return f"{_where(part)}, but its copy out is queued before {since}"
        elif before is not None and before.action == "swap" and part.leave_op <= before.next_use_op:
            return f"{_where(part)}, but leaves before compute has waited for the copy in before"
        ends[part.buffer_id] = part
    return None


def _where(absence: Absence) -> str:
    return f"buffer {absence.buffer_id} is away at ops {absence.leave_op} to {absence.return_op}"


def _walk_fault(trace: Trace, plan: Plan) -> str | None:
    """Go through the step and return what is wrong first."""
    budget_bytes = plan.header.budget_bytes
    for moment in Walk(trace, plan).moments():
        op = trace.ops[moment.op]
        if moment.is_replay and not op.recomputable:
            return f"{_when(trace, moment)} repeats an op that is not known to give the same bits"
        for id_ in moment.unmade:
            return f"buffer {id_} returns at op {moment.at_op}, but no replay there writes it"
        for id_ in moment.missing:
            return f"{_when(trace, moment)} reads buffer {id_}, which is not on the device"
        for id_ in moment.unready:
            return f"{_when(trace, moment)} reads buffer {id_} before compute has waited for its copy in"
        over_bytes = moment.held_bytes - budget_bytes
        if over_bytes > 0:
            where = f"in {_when(trace, moment)}" if moment.is_replay else f"at {_when(trace, moment)}"
            return f"the budget of {format_bytes(budget_bytes)} is passed by {format_bytes(over_bytes)} {where}"
    return None


def _when(trace: Trace, moment: Moment) -> str:
    op = f"op {moment.op} ({trace.ops[moment.op].name})"
    return f"the replay of {op} before op {moment.at_op}" if moment.is_replay else op
