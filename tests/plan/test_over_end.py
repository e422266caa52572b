"""Plans whose buffers are away from their last use in one step to their first use in the next one."""

import pytest
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import PlanError
from torchdelta.plan.file import read_plan, write_plan
from torchdelta.plan.model import Absence, Plan, PlanHeader, Replay
from torchdelta.plan.validate import find_fault, validate
from torchdelta.trace.model import BEFORE_STEP, load_curve, storage_versions, versions_over_end
from torchdelta.trace.validate import validate as validate_trace

STEP = chain([(MIB, 2e-3, 1e-4)] * 3, weight_bytes=4 * MIB, optimizer=True)
NUM_OPS = len(STEP.ops)
OVER_END = versions_over_end(STEP)


def last_versions(kind):
    """The buffers of a kind that the step leaves to the next one."""
    return [STEP.buffers[id_] for id_ in OVER_END if STEP.buffers[id_].kind == kind]


def first_use(buffer):
    """The op of the next step that uses first what the step left in a buffer."""
    first = OVER_END[buffer.id]
    return min([op.index for op in STEP.ops if first.id in op.reads] + [first.death_op])


def over_end(buffer, **changes):
    """Away from right after its birth until right before its first use in the next step."""
    last_use = max([op.index for op in STEP.ops if buffer.id in op.reads] + [buffer.birth_op])
    away = Absence(
        buffer_id=buffer.id,
        last_use_op=last_use,
        next_use_op=NUM_OPS + first_use(buffer),
        action="swap",
        leave_op=last_use + 1,
        return_op=NUM_OPS + first_use(buffer),
    )
    return replace(away, **changes)


def between(buffer, reads):
    """Away from right after its first read until right before its second one."""
    return Absence(
        buffer_id=buffer.id,
        last_use_op=reads[0],
        next_use_op=reads[1],
        action="swap",
        leave_op=reads[0] + 1,
        return_op=reads[1],
    )


def plan_of(*absences, budget_bytes=2**40, replays=()):
    """A plan of the class *all*."""
    header = PlanHeader(
        planner="by hand",
        decision_class="all",
        machine="test",
        budget_bytes=budget_bytes,
        num_ops=NUM_OPS,
        num_buffers=len(STEP.buffers),
    )
    return Plan(header=header, absences=absences, replays=replays)


MOMENTUM = last_versions("optimizer_state")[-1]  # of the block that the optimizer visits first
WEIGHT = last_versions("parameter")[0]


def least_budget(*absences):
    """The least budget that the validator accepts, in bytes."""
    low, high = -1, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if find_fault(STEP, plan_of(*absences, budget_bytes=middle)) else (low, middle)
    return high


def test_what_outlives_the_step_goes_on_as_its_first_version():
    """Parameters and states: the next step begins with what this one wrote last."""
    validate_trace(STEP)
    assert {STEP.buffers[id_].kind for id_ in OVER_END} == {"parameter", "optimizer_state", "input"}
    for id_, first in OVER_END.items():
        assert first.birth_op == BEFORE_STEP
        assert storage_versions(STEP)[first.storage_id][-1].id == id_


def test_a_state_is_away_at_both_ends_of_the_step():
    """A momentum is there at its one use only: every other moment holds less by its size, the first one included."""
    budget_bytes = load_curve(STEP)
    used = first_use(MOMENTUM)
    states = [over_end(buffer) for buffer in last_versions("optimizer_state")]
    validate(STEP, plan_of(*states))
    away = sum(STEP.buffers[absence.buffer_id].size_bytes for absence in states)
    highest = max(range(NUM_OPS), key=lambda op: budget_bytes[op])
    assert highest < used  # the plain peak is in backward, where no momentum is needed
    in_optimizer = max(
        bytes_ - away + 4 * MIB * any(first_use(STEP.buffers[a.buffer_id]) == op for a in states)
        for op, bytes_ in enumerate(budget_bytes)
    )
    assert least_budget(*states) == in_optimizer


def test_a_parameter_is_back_for_the_forward_of_the_next_step():
    """Written by the optimizer, read by the forward of the next step: one op later is too late."""
    right = over_end(WEIGHT)
    assert OVER_END[WEIGHT.id].id != WEIGHT.id
    validate(STEP, plan_of(right))
    used = first_use(WEIGHT)
    late = replace(right, next_use_op=right.next_use_op + 1, return_op=right.return_op + 1)
    fault = find_fault(STEP, plan_of(late))
    assert fault is not None
    assert f"op {used} ({STEP.ops[used].name}) reads buffer {OVER_END[WEIGHT.id].id}, which is not" in fault


def test_a_copy_that_ends_in_the_next_step_holds_its_memory_until_then():
    """Its bytes count at the beginning of the step as long as it is on its way."""
    used = first_use(MOMENTUM)
    first_op = load_curve(STEP)[0]

    def least_at_first_op(leave_op):
        only = replace(STEP, ops=tuple(replace(op, workspace_bytes=2**30 if op.index == 0 else 0) for op in STEP.ops))
        plan = plan_of(over_end(MOMENTUM, leave_op=leave_op), budget_bytes=first_op + 2**30 - 4 * MIB)
        return find_fault(only, plan)

    assert least_at_first_op(MOMENTUM.birth_op + 2) is None
    assert least_at_first_op(NUM_OPS) is None
    assert "passed by 4.00 MiB at op 0" in (least_at_first_op(NUM_OPS + 1) or "")
    assert find_fault(STEP, plan_of(over_end(MOMENTUM, leave_op=NUM_OPS + used))) is None


def test_one_that_is_back_before_the_end_is_there_when_the_next_step_begins():
    """It is away within the step only, at its last version."""
    early = over_end(MOMENTUM, return_op=NUM_OPS - 1)
    validate(STEP, plan_of(early))
    assert least_budget(early) > least_budget(over_end(MOMENTUM))


def test_wrong_absences_over_the_end_are_named():
    """Each is one line that says what is wrong."""
    activation = next(buffer for buffer in STEP.buffers if buffer.kind == "activation")
    used = first_use(MOMENTUM)
    wrong = [
        (over_end(MOMENTUM, action="recompute"), "only a swap brings it back"),
        (over_end(MOMENTUM, buffer_id=OVER_END[MOMENTUM.id].id), "does not begin with it"),
        (
            over_end(MOMENTUM, buffer_id=activation.id, last_use_op=NUM_OPS - 2, leave_op=NUM_OPS - 1),
            "does not begin with it",
        ),
        (
            over_end(MOMENTUM, next_use_op=NUM_OPS + used + 1, return_op=NUM_OPS + used + 1),
            f"is overwritten at op {used}",
        ),
        (over_end(MOMENTUM, last_use_op=MOMENTUM.birth_op - 1, leave_op=NUM_OPS), "but its uses around that"),
        (over_end(MOMENTUM, last_use_op=NUM_OPS, leave_op=NUM_OPS + 1), "but its uses around that"),
        (over_end(MOMENTUM, return_op=NUM_OPS + used + 1), "but its uses around that"),
    ]
    for absence, words in wrong:
        with pytest.raises(PlanError, match=words) as caught:
            validate(STEP, plan_of(absence))
        assert "\n" not in str(caught.value)


def test_an_absence_over_the_end_and_one_within_the_step_do_not_meet():
    """A parameter that has not come back from the step before cannot leave again."""
    first = OVER_END[WEIGHT.id]
    reads = [op.index for op in STEP.ops if first.id in op.reads]
    within = between(first, reads)
    validate(STEP, plan_of(within, over_end(WEIGHT)))
    twice = replace(within, last_use_op=max(reads[0] - 1, 0), leave_op=max(reads[0] - 1, 0) + 1)
    late = over_end(WEIGHT, next_use_op=NUM_OPS + reads[1], return_op=NUM_OPS + reads[1])
    assert "has not come back" in (find_fault(STEP, plan_of(twice, late)) or "")


def test_a_replay_does_not_find_a_parameter_that_is_away():
    """What the step found is there for a replay unless the plan took it away."""
    first = OVER_END[WEIGHT.id]
    reads = [op.index for op in STEP.ops if first.id in op.reads]
    replay = Replay(at_op=reads[1] - 1, ops=(reads[0],))
    within = between(first, reads)
    validate(STEP, plan_of(replays=(replay,)))
    fault = find_fault(STEP, plan_of(within, replays=(replay,)))
    assert fault is not None
    assert f"reads buffer {first.id}, which is not on the device" in fault


def test_the_host_holds_at_both_ends_what_is_away_over_the_end():
    """One byte less than all states at once is too little, at the first op as at the last one."""
    states = [over_end(buffer) for buffer in last_versions("optimizer_state")]
    total = sum(STEP.buffers[absence.buffer_id].size_bytes for absence in states)
    assert find_fault(STEP, plan_of(*states), replace(MACHINE, host_memory_bytes=total)) is None
    fault = find_fault(STEP, plan_of(*states), replace(MACHINE, host_memory_bytes=total - 1))
    assert fault is not None
    assert "at op 0 the host would hold" in fault


def test_a_plan_over_the_end_comes_back_from_its_file(tmp_path):
    """With ops that count on into the next step."""
    plan = plan_of(over_end(MOMENTUM), over_end(WEIGHT, leave_op=NUM_OPS))
    write_plan(plan, tmp_path / "a.plan")
    assert read_plan(tmp_path / "a.plan") == plan
