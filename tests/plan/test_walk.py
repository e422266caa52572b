"""The walk over a step under a plan: what is on the device at each moment, keeps and moments of copies included."""

import pytest
from msgspec.structs import replace

from tests.planners.chains import MIB
from torchdelta.plan.model import Absence, Keep, Plan, PlanHeader, Replay
from torchdelta.plan.validate import find_fault
from torchdelta.plan.walk import Walk, tier_load
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.planned import lives_of_plan
from torchdelta.trace.model import Buffer, Header, Op, Trace, load_curve

# A chain of four ops in forward, then a backward that needs what ops 3, 2 and 1 made, in this order; 6 is idle.
READS = [(), (0,), (1,), (2,), (3, 2), (2, 1), (), (1, 0)]
DEATHS = [8, 8, 6, 5]
TRACE = Trace(
    header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
    buffers=tuple(
        Buffer(id=id_, storage_id=id_, size_bytes=MIB << id_, kind="activation", birth_op=id_, death_op=death)
        for id_, death in enumerate(DEATHS)
    ),
    ops=tuple(
        Op(
            index=index,
            name=f"aten.op{index}.default",
            phase="forward" if index < 4 else "backward",
            reads=reads,
            writes=(index,) if index < 4 else (),
            time_s=1.0,
            recomputable=True,
        )
        for index, reads in enumerate(READS)
    ),
)


def plan_of(*absences, replays=(), budget_bytes=2**40):
    """A plan of that step."""
    header = PlanHeader(
        planner="by hand",
        decision_class="extended",
        machine="test",
        budget_bytes=budget_bytes,
        num_ops=len(TRACE.ops),
        num_buffers=len(TRACE.buffers),
    )
    return Plan(header=header, absences=absences, replays=replays)


def swap(buffer_id, last, leave, back, needed, **more):
    """One swap."""
    return Absence(
        buffer_id=buffer_id,
        last_use_op=last,
        next_use_op=needed,
        action="swap",
        leave_op=leave,
        return_op=back,
        **more,
    )


def drop(buffer_id, last, back, **more):
    """One recomputation."""
    return Absence(
        buffer_id=buffer_id,
        last_use_op=last,
        next_use_op=back,
        action="recompute",
        leave_op=last + 1,
        return_op=back,
        **more,
    )


def here(plan):
    """What is on the device at each op, and at each op of the replays before it."""
    walk = Walk(TRACE, plan)
    return [(moment.op, set(walk.here)) for moment in walk.moments()]


def test_without_a_plan_the_walk_is_the_load_curve():
    """Every moment holds what lives there."""
    moments = list(Walk(TRACE, plan_of()).moments())
    assert [moment.held_bytes for moment in moments] == load_curve(TRACE)
    assert not any(moment.missing or moment.freed for moment in moments[:5])


def test_a_swap_leaves_and_returns_when_it_says():
    """Late in its gap and back ahead of its use: away at the ops in between, and on the host from the copy on."""
    away = swap(0, last=1, leave=4, back=6, needed=7, out_op=2)
    plan = plan_of(away)
    assert find_fault(TRACE, plan) is None
    assert [op for op, found in here(plan) if 0 not in found] == [4, 5]
    assert tier_load(TRACE, plan.absences, "host") == [0, 0, 0, MIB, MIB, MIB, MIB, MIB]
    assert tier_load(TRACE, plan.absences, "disk") == [0] * 8


def test_a_buffer_may_leave_several_times_in_different_ways():
    """Buffer 1 is swapped between its uses in forward and backward, and dropped before the last one."""
    plan = plan_of(
        swap(1, last=2, leave=3, back=5, needed=5), drop(1, last=5, back=7), replays=(Replay(at_op=7, ops=(1,)),)
    )
    assert find_fault(TRACE, plan) is None
    assert [op for op, found in here(plan) if 1 not in found] == [0, 3, 4, 6]
    unrepeated = replace(plan, replays=())
    assert "no replay there writes it" in (find_fault(TRACE, unrepeated) or "")


def test_a_replay_may_be_issued_ahead_of_the_use():
    """Dropped after op 2, made again before op 4, read by op 5."""
    plan = plan_of(drop(1, last=2, back=4), replays=(Replay(at_op=4, ops=(1,)),))
    assert find_fault(TRACE, plan) is None
    assert [op for op, found in here(plan) if 1 not in found] == [0, 3]


def test_what_a_replay_keeps_is_there_for_the_next_one():
    """Buffer 1 is made for buffer 2 at op 4 and kept for two ops, so that buffer 2's second replay needs op 2 alone."""
    absences = (drop(1, last=2, back=7), drop(2, last=3, back=4), drop(2, last=4, back=5))
    first, second, third = Replay(at_op=4, ops=(1, 2)), Replay(at_op=5, ops=(2,)), Replay(at_op=7, ops=(1,))
    kept = replace(first, keeps=(Keep(buffer_id=1, until_op=6),))
    plan = plan_of(*absences, replays=(kept, second, third))
    assert find_fault(TRACE, plan) is None
    assert [op for op, found in here(plan) if 1 in found] == [1, 2, 1, 2, 4, 2, 5, 1, 7]
    forgot = plan_of(*absences, replays=(first, second, third))
    assert "the replay of op 2 (aten.op2.default) before op 5 reads buffer 1" in (find_fault(TRACE, forgot) or "")
    peak_bytes = max(moment.held_bytes for moment in Walk(TRACE, plan).moments())
    assert max_load_bytes(lives_of_plan(TRACE, plan)) == peak_bytes


def test_what_a_replay_keeps_past_its_absence_stays():
    """A keep ends where an absence of the same buffer ends: from there on the buffer is there for good."""
    keep = Keep(buffer_id=1, until_op=6)
    plan = plan_of(swap(1, last=2, leave=3, back=5, needed=5), replays=(Replay(at_op=4, ops=(1,), keeps=(keep,)),))
    assert find_fault(TRACE, plan) is None
    assert [op for op, found in here(plan) if 1 not in found] == [0, 3]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(swap(0, last=1, leave=3, back=5, needed=7, out_op=3)), "its copy out is queued after op 3"),
        (plan_of(swap(0, last=1, leave=3, back=5, needed=7, out_op=0)), "its copy out is queued after op 0"),
        (plan_of(swap(1, last=2, leave=3, back=4, needed=7)), "reads buffer 1 before compute has waited for its copy"),
        (plan_of(swap(0, last=1, leave=3, back=5, needed=7, carried_s=1.0)), "said to take 1.0 seconds"),
        (
            plan_of(swap(0, last=1, leave=3, back=4, needed=6), swap(0, last=5, leave=6, back=7, needed=7)),
            "before compute has waited for the copy in before",
        ),
        (plan_of(replays=(Replay(at_op=4, ops=(1,), keeps=(Keep(buffer_id=2, until_op=6),)),)), "does not make"),
        (plan_of(replays=(Replay(at_op=4, ops=(1,), keeps=(Keep(buffer_id=1, until_op=4),)),)), "until op 4"),
    ],
)
def test_moments_that_cannot_be_are_named(plan, said):
    """A copy out that is queued after its memory is free, a read before the copy in has ended, a keep of nothing."""
    assert said in (find_fault(TRACE, plan) or "")


def test_what_is_written_in_place_again_takes_over_the_memory_of_what_was_kept():
    """An addition in place: the replay of it destroys the version before, wherever a replay made that one."""
    buffers = [(0, 0, 1), (0, 1, 5), (1, 4, 5)]
    trace = Trace(
        header=TRACE.header,
        buffers=tuple(
            Buffer(id=id_, storage_id=storage, size_bytes=MIB, kind="activation", birth_op=birth, death_op=death)
            for id_, (storage, birth, death) in enumerate(buffers)
        ),
        ops=tuple(
            Op(index=index, name="aten.add_.Tensor", phase="forward", reads=reads, writes=writes, recomputable=True)
            for index, (reads, writes) in enumerate([((), (0,)), ((0,), (1,)), ((), ()), ((), ()), ((1,), (2,))])
        ),
    )
    header = replace(plan_of().header, num_ops=5, num_buffers=3)
    replays = (Replay(at_op=3, ops=(0,), keeps=(Keep(buffer_id=0, until_op=5),)), Replay(at_op=4, ops=(1,)))
    plan = Plan(header=header, absences=(drop(1, last=1, back=4),), replays=replays)
    assert find_fault(trace, plan) is None
    assert [moment.held_bytes for moment in Walk(trace, plan).moments()] == [MIB, MIB, 0, MIB, MIB, MIB, 2 * MIB]
    assert max_load_bytes(lives_of_plan(trace, plan)) == 2 * MIB


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_replay_reads_nothing_that_the_step_has_freed_or_overwritten(is_overwritten):
    """Also not what was there before the step: its bytes would count nowhere."""
    buffers = list(TRACE.buffers)
    buffers += [Buffer(id=4, storage_id=4, size_bytes=MIB, kind="input", birth_op=-1, death_op=2)]
    ops = [replace(TRACE.ops[0], reads=(4,)), *TRACE.ops[1:]]
    if is_overwritten:
        buffers += [Buffer(id=5, storage_id=4, size_bytes=MIB, kind="input", birth_op=2, death_op=8)]
        ops[2] = replace(ops[2], writes=(2, 5))
    trace = replace(TRACE, buffers=tuple(buffers), ops=tuple(ops))
    dropped = Absence(buffer_id=0, last_use_op=1, next_use_op=7, action="recompute", leave_op=2, return_op=7)
    plan = plan_of(dropped, replays=(Replay(at_op=7, ops=(0,)),))
    plan = replace(plan, header=replace(plan.header, num_buffers=len(buffers)))
    assert "before op 7 reads buffer 4, which is not on the device" in (find_fault(trace, plan) or "")
    kept = replace(trace, buffers=(*buffers[:4], replace(buffers[4], death_op=8)), ops=tuple(ops[:2]) + TRACE.ops[2:])
    plan = replace(plan, header=replace(plan.header, num_buffers=5))
    assert find_fault(kept, plan) is None
