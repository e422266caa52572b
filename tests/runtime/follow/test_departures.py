"""Steps that leave persistent tensors to later ones: in their plans, these tensors depart."""

from __future__ import annotations

from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, chain
from tests.runtime.follow.test_schedule import _log, _plan
from torchdelta.planners.registry import get
from torchdelta.runtime.follow.departures import DEPARTURE_OPS, makes_states, with_departures
from torchdelta.runtime.follow.persistent_schedule import make_persistent_schedule
from torchdelta.runtime.memory.planned_moves import Move
from torchdelta.trace.model import BEFORE_STEP, Buffer, peak, uses_of
from torchdelta.trace.validate import validate

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


def test_states_that_are_not_used_leave_at_the_beginning():
    """They do not count in the plan, which is possible in a smaller budget."""
    found = with_departures(WITH_STATE, _log(persistents=KEYS | {UNUSED.id: UNUSED.id}, num_ops=NUM_OPS))
    assert found is not None
    trace, log = found
    validate(trace)
    assert (0, UNUSED.id) in log.departures
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
    assert set(log.departures) == expected
    assert all(trace.buffers[key].death_op == op for op, key in log.departures)


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
