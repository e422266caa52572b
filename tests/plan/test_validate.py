"""The validator accepts a plan that is right and names what is wrong with one that is not."""

import pytest
from msgspec.structs import replace

from tests.planners.chains import MIB
from torchdelta.errors import PlanError
from torchdelta.plan.validate import find_fault, validate
from torchdelta.trace.model import load_curve, peak


def with_header(plan, **changes):
    """The plan under a changed header."""
    return replace(plan, header=replace(plan.header, **changes))


def with_absence(plan, action, **changes):
    """The plan with its first absence of an action changed."""
    index = next(i for i, absence in enumerate(plan.absences) if absence.action == action)
    absences = list(plan.absences)
    absences[index] = replace(absences[index], **changes)
    return replace(plan, absences=tuple(absences))


def test_a_right_plan_is_accepted(step, plan):
    """Two swaps, two replays of a dead chain."""
    assert {absence.action for absence in plan.absences} == {"swap", "recompute"}
    assert max(len(replay.ops) for replay in plan.replays) == 2
    assert find_fault(step, plan) is None
    validate(step, plan)


def test_the_budget_is_counted_anew(step, plan):
    """A plan that frees nothing at the peak does not hold less than the peak."""
    nothing = replace(plan, absences=(), replays=())
    assert find_fault(step, with_header(nothing, budget_bytes=peak(step).size_bytes)) is None
    fault = find_fault(step, with_header(nothing, budget_bytes=peak(step).size_bytes - 1))
    assert fault is not None
    assert "passed by 1 B at op" in fault


def test_a_replay_counts_its_transients(step, plan):
    """An op with a large workspace that fits in forward does not where it is replayed, beside more that is alive."""
    replay = plan.replays[0]
    first = replay.ops[0]
    ops = tuple(replace(op, workspace_bytes=1024 * MIB) if op.index == first else op for op in step.ops)
    heavy = replace(step, ops=ops)
    budget_bytes = load_curve(heavy, with_workspace=True)[first]
    fault = find_fault(heavy, with_header(plan, budget_bytes=budget_bytes))
    assert fault is not None
    assert f"replay of op {first} ({step.ops[first].name}) before op {replay.at_op}" in fault


def test_a_use_while_away_is_found(step, plan):
    """A buffer that returns after its next use was needed before."""
    swapped = next(absence for absence in plan.absences if absence.action == "swap")
    late = with_absence(plan, "swap", next_use_op=swapped.next_use_op + 1, return_op=swapped.next_use_op + 1)
    fault = find_fault(step, late)
    assert fault is not None
    assert f"reads buffer {swapped.buffer_id}, which is not on the device" in fault


def test_a_copy_out_follows_on_the_replay_that_makes_its_content(step, plan):
    """A buffer that was dropped and comes back cannot be copied out before."""
    dropped = next(absence for absence in plan.absences if absence.action == "recompute")
    again = replace(
        dropped,
        last_use_op=dropped.last_use_op,
        out_op=dropped.return_op,
        next_use_op=dropped.return_op + 1,
        action="swap",
        leave_op=dropped.return_op + 1,
        return_op=dropped.return_op + 1,
    )
    assert find_fault(step, replace(plan, absences=(*plan.absences, again))) is None
    early = replace(again, out_op=dropped.return_op - 1)
    fault = find_fault(step, replace(plan, absences=(*plan.absences, early)))
    assert fault is not None
    assert "its copy out is queued before the replay before has made it" in fault


def test_a_recomputed_buffer_needs_its_replay(step, plan):
    """Without the replay nothing writes what returns."""
    fault = find_fault(step, replace(plan, replays=()))
    assert fault is not None
    assert "no replay there writes it" in fault


def test_a_replay_needs_its_inputs(step, plan):
    """The last op of a chain alone reads what has died."""
    replay = next(replay for replay in plan.replays if len(replay.ops) == 2)
    others = tuple(other for other in plan.replays if other is not replay)
    shorter = replace(
        plan, replays=tuple(sorted((*others, replace(replay, ops=replay.ops[1:])), key=lambda r: r.at_op))
    )
    fault = find_fault(step, shorter)
    assert fault is not None
    assert "which is not on the device" in fault


def test_only_recomputable_ops_are_replayed(step, plan):
    """The same bits are not known to come again from anything else."""
    ops = tuple(replace(op, recomputable=False) for op in step.ops)
    fault = find_fault(replace(step, ops=ops), plan)
    assert fault is not None
    assert "not known to give the same bits" in fault


def test_order_and_identity_are_checked(step, plan):
    """An absence the wrong way round, a buffer that is not there, another trace, a replay from the future."""
    swapped = next(absence for absence in plan.absences if absence.action == "swap")
    wrong = [
        with_absence(plan, "swap", leave_op=swapped.last_use_op),
        with_absence(plan, "swap", buffer_id=10_000),
        with_header(plan, num_ops=3),
        with_header(plan, format="something-else"),
        replace(plan, replays=tuple(reversed(plan.replays))),
        replace(plan, replays=(replace(plan.replays[0], ops=(plan.replays[0].at_op,)),)),
        replace(plan, absences=(*plan.absences, plan.absences[0])),
    ]
    for broken in wrong:
        with pytest.raises(PlanError) as caught:
            validate(step, broken)
        assert "\n" not in str(caught.value)


def test_a_buffer_does_not_leave_before_its_copy_in_has_been_waited_for(step, plan):
    """Until then the link writes into its memory, which cannot be free."""
    swapped = next(absence for absence in plan.absences if absence.action == "swap")
    back = replace(swapped, return_op=swapped.leave_op + 1)
    dropped = replace(
        swapped,
        action="recompute",
        last_use_op=back.return_op,
        leave_op=back.return_op + 1,
        return_op=swapped.next_use_op,
    )
    others = tuple(absence for absence in plan.absences if absence.buffer_id != swapped.buffer_id)
    fault = find_fault(step, replace(plan, absences=(*others, back, dropped)))
    assert fault is not None
    assert "leaves before compute has waited for the copy in before" in fault
