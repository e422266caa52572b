"""Steps that leave persistent tensors to later ones: in their plans, these tensors depart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, chain
from tests.runtime.follow.test_schedule import _log, _plan
from torchdelta.planners.registry import get
from torchdelta.runtime.follow.departures import (
    DEPARTURE_OPS,
    departures_time_s,
    makes_states,
    with_departures,
    with_gradients_departing,
)
from torchdelta.runtime.follow.persistent_schedule import make_persistent_schedule
from torchdelta.runtime.follow.step_log import Departure
from torchdelta.runtime.memory.planned_moves import Move
from torchdelta.trace.model import BEFORE_STEP, Buffer, load_curve, peak, uses_of
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

STEP = chain([(8 * MIB, 8e-3, 1e-4)] * 4, weight_bytes=4 * MIB)  # without an optimizer
NUM_OPS = len(STEP.ops)
UNUSED = Buffer(
    id=len(STEP.buffers),
    storage_id=max(buffer.storage_id for buffer in STEP.buffers) + 1,
    size_bytes=64 * MIB,
    kind="optimizer_state",
    birth_op=BEFORE_STEP,
    death_op=NUM_OPS,
)
WITH_STATE = replace(STEP, buffers=(*STEP.buffers, UNUSED))
GRADIENTS = [buffer for buffer in STEP.buffers if buffer.kind == "gradient" and buffer.death_op == NUM_OPS]
KEYS = {buffer.id: buffer.id for buffer in WITH_STATE.buffers if buffer.kind in {"parameter", "gradient"}}

WHOLE = chain([(8 * MIB, 8e-3, 1e-4)] * 4, weight_bytes=4 * MIB, optimizer=True)
PERSISTENTS = {each.id: each.storage_id for each in WHOLE.buffers if each.kind not in {"activation", "temporary"}}
WHOLE_LOG = _log(persistents=PERSISTENTS, num_ops=len(WHOLE.ops))
READ_AT = {each.id: uses_of(WHOLE)[each.id][-1] for each in WHOLE.buffers if each.kind == "gradient"}
OPTIMIZER_BYTES = max(
    load for load, op in zip(load_curve(WHOLE, with_workspace=True), WHOLE.ops, strict=True) if op.phase == "optimizer"
)


def test_states_that_are_not_used_leave_at_the_beginning():
    """They do not count in the plan, which is possible in a smaller budget."""
    found = with_departures(WITH_STATE, _log(persistents=KEYS | {UNUSED.id: UNUSED.id}, num_ops=NUM_OPS))
    assert found is not None
    trace, log = found
    validate(trace)
    departure = Departure(copy_op=0, leave_op=0, key=UNUSED.id, size_bytes=UNUSED.size_bytes)
    assert departure in log.departures
    assert peak(trace).size_bytes <= peak(WITH_STATE).size_bytes - UNUSED.size_bytes
    get("torchdelta", "persistent")(trace, MACHINE, peak(STEP).size_bytes)
    schedule = make_persistent_schedule(_plan(), log)
    assert schedule is not None
    assert (0, Move.LEAVE, UNUSED.id) in schedule.moves


def test_gradients_leave_after_their_last_use():
    """Each has time for its copy out before it counts as gone; the parameters, which the next step reads, stay."""
    found = with_departures(STEP, _log(persistents=KEYS, num_ops=NUM_OPS))
    assert found is not None
    trace, log = found
    validate(trace)
    uses = uses_of(STEP)
    expected = {
        (uses[gradient.id][-1] + DEPARTURE_OPS, gradient.id)
        for gradient in GRADIENTS
        if uses[gradient.id][-1] + DEPARTURE_OPS < NUM_OPS
    }
    assert expected
    assert {(each.leave_op, each.key) for each in log.departures} == expected
    assert all(trace.buffers[each.key].death_op == each.leave_op for each in log.departures)
    assert all(each.copy_op < each.leave_op for each in log.departures)


def test_nothing_is_changed_where_everything_is_used_again():
    """Nor where it is not known which buffers persist."""
    assert with_departures(WITH_STATE, _log(num_ops=NUM_OPS)) is None
    whole = chain([(8 * MIB, 8e-3, 1e-4)] * 4, optimizer=True)
    states = {buffer.id: 1 for buffer in whole.buffers if buffer.kind in {"parameter", "optimizer_state"}}
    assert with_departures(whole, _log(persistents=states, num_ops=len(whole.ops))) is None


def test_a_step_that_makes_states_is_known():
    """An optimizer's first step; not one that writes states that were there."""
    whole = chain([(8 * MIB, 8e-3, 1e-4)] * 4, optimizer=True)
    assert not makes_states(whole)
    new = tuple(b for b in whole.buffers if not (b.kind == "optimizer_state" and b.birth_op == BEFORE_STEP))
    assert makes_states(replace(whole, buffers=new))


def test_as_many_gradients_depart_as_the_budget_lacks_bytes():
    """Those that the optimizer reads first. Each is copied out after it was made, and is gone once it was read."""
    in_order = sorted(READ_AT, key=READ_AT.__getitem__)
    for num_lacking in (1, 2, 3):
        found = with_gradients_departing(WHOLE, WHOLE_LOG, MACHINE, OPTIMIZER_BYTES - num_lacking * 4 * MIB)
        assert found is not None
        trace, log = found
        validate(trace)
        leaving = in_order[:num_lacking]
        assert [each.key for each in log.departures] == leaving
        assert [each.copy_op for each in log.departures] == [WHOLE.buffers[id_].birth_op + 1 for id_ in leaving]
        assert [each.leave_op for each in log.departures] == [READ_AT[id_] + 1 for id_ in leaving]
        assert [trace.buffers[id_].death_op for id_ in leaving] == [READ_AT[id_] + 1 for id_ in leaving]
        changed = [new.id for old, new in zip(WHOLE.buffers, trace.buffers, strict=True) if old != new]
        assert sorted(changed) == sorted(leaving)
        size_bytes = 4 * MIB * num_lacking
        machine = replace(MACHINE, out_compute_s_per_byte=1e-9, copy_compute_s=1e-3)
        assert departures_time_s(log, machine) == pytest.approx(size_bytes * 1e-9 + num_lacking * 1e-3)


def test_gradients_of_the_step_before_have_departed_there():
    """So a loop that frees gradients only before backward has their memory in forward."""
    before = [
        replace(WHOLE.buffers[id_], id=len(WHOLE.buffers) + index, storage_id=1000 + index, birth_op=BEFORE_STEP)
        for index, id_ in enumerate(READ_AT)
    ]
    freed_op = min(WHOLE.buffers[id_].birth_op for id_ in READ_AT)
    late = replace(WHOLE, buffers=(*WHOLE.buffers, *(replace(each, death_op=freed_op) for each in before)))
    keys = {old.id: id_ for old, id_ in zip(before, READ_AT, strict=True)}
    found = with_gradients_departing(late, _log(persistents=PERSISTENTS | keys), MACHINE, OPTIMIZER_BYTES - 8 * MIB)
    assert found is not None
    trace, log = found
    validate(trace)
    departing = {each.key for each in log.departures}
    assert len(departing) == 2
    for old in before:
        assert trace.buffers[old.id].size_bytes == (0 if keys[old.id] in departing else old.size_bytes)


def test_no_gradient_departs_without_need():
    """Nor one that is small, that departs already, or that is used after the optimizer has read it."""

    def departs(trace: Trace, log: StepLog, budget_bytes: int = 4 * MIB) -> bool:
        return with_gradients_departing(trace, log, MACHINE, budget_bytes) is not None

    assert departs(WHOLE, WHOLE_LOG)
    assert not departs(WHOLE, WHOLE_LOG, OPTIMIZER_BYTES)
    assert not departs(STEP, _log(persistents=KEYS, num_ops=NUM_OPS))  # it has no optimizer
    assert not departs(WHOLE, _log(num_ops=len(WHOLE.ops)))
    assert not departs(replace(WHOLE, header=replace(WHOLE.header, device="cuda")), WHOLE_LOG)
    firsts = [
        replace(
            WHOLE.buffers[id_],
            id=len(WHOLE.buffers) + index,
            birth_op=BEFORE_STEP,
            death_op=WHOLE.buffers[id_].birth_op,
        )
        for index, id_ in enumerate(READ_AT)
    ]  # their memory outlives the step, as after `zero_grad(set_to_none=False)`
    assert not departs(replace(WHOLE, buffers=(*WHOLE.buffers, *firsts)), WHOLE_LOG)
    tail = WHOLE.ops[-1]
    read = replace(tail, index=len(WHOLE.ops), phase="other", reads=tuple(READ_AT), writes=(), recomputable=False)
    buffers = tuple(replace(b, death_op=read.index + 1) if b.death_op == read.index else b for b in WHOLE.buffers)
    assert not departs(replace(WHOLE, ops=(*WHOLE.ops, read), buffers=buffers), WHOLE_LOG)
    small = chain([(8 * MIB, 8e-3, 1e-4)] * 4, weight_bytes=2**17, optimizer=True)
    assert not departs(small, WHOLE_LOG, 2**17)
    found = with_gradients_departing(WHOLE, WHOLE_LOG, MACHINE, OPTIMIZER_BYTES - 1)
    assert found is not None
    assert not departs(*found)


def test_a_gradient_stays_if_its_copy_would_take_longer_than_until_it_is_read():
    """Its copy would be waited for while the optimizer runs. Copies out follow one another."""
    in_order = sorted(READ_AT, key=READ_AT.__getitem__)
    time_s = sum(op.time_s for op in WHOLE.ops[WHOLE.buffers[in_order[0]].birth_op + 1 : READ_AT[in_order[0]] + 1])
    machine = replace(MACHINE, host_out_bytes_per_s=4 * MIB / time_s)  # the copy of the first one ends just in time
    found = with_gradients_departing(WHOLE, WHOLE_LOG, machine, 4 * MIB)
    assert found is not None
    assert [each.key for each in found[1].departures] == in_order[:1]
    slow = replace(machine, host_out_bytes_per_s=0.9 * machine.host_out_bytes_per_s)
    assert with_gradients_departing(WHOLE, WHOLE_LOG, slow, 4 * MIB) is None
