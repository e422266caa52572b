"""What `execute` makes of a plan is what its planner saw, and it prices the moments that are written."""

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.simulate.test_against_validator import some_codes
from tests.trace.strategies import traces
from torchdelta.errors import PlanError
from torchdelta.plan.model import Absence, Plan, PlanHeader, Replay
from torchdelta.plan.over_end import parts_within_step
from torchdelta.simulate import Decision, Options, execute, schedule
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Buffer, Header, Op, Trace, versions_over_end

DISKY = replace(MACHINE, disk_write_bytes_per_s=3e8, disk_read_bytes_per_s=5e8, disk_latency_s=1e-4)
STEP = chain([(8 * MIB, 2e-3, 1e-4)] * 4)
NUM_OPS = len(STEP.ops)
WIDE = STEP.ops[0].writes[0]
USES = [0, *(op.index for op in STEP.ops if WIDE in op.reads)]
COPY_S = 8 * MIB / 1e9


@st.composite
def problems(draw):
    """Draw a step, a machine, a class, and how the runtime behaves."""
    decision_class = draw(st.sampled_from(["saved", "extended", "all"]))
    drawn = draw(blocks() | st.none())
    is_all = decision_class == "all"
    trace = draw(traces(lasting=is_all)) if drawn is None else chain(drawn, optimizer=is_all)
    machine = replace(DISKY, both_ways_factor=draw(st.sampled_from([1.0, 0.8, 0.5, 0.3])))
    if draw(st.booleans()):
        machine = replace(machine, out_compute_s_per_byte=4e-10, in_compute_s_per_byte=2e-10)
        machine = replace(machine, copy_compute_s=3e-5, replay_compute_s=7e-5)
    options = Options(prefetch=draw(st.booleans()), synchronous=draw(st.booleans()))
    return PlanningProblem.of(trace, machine, decision_class=decision_class, min_size_bytes=1, options=options)


@settings(max_examples=100)
@given(st.data(), problems())
def test_a_plan_costs_what_the_kernel_says(data, problem):
    """Under any decisions, also those that pass the budget: the same bytes at each op, time, stalls and replays."""
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    score = problem.score(codes, budget_bytes)
    assume(score.time_s < float("inf"))
    found = execute(problem.trace, problem.machine, problem.program(codes, budget_bytes))
    assert found.time_s == pytest.approx(score.time_s, rel=1e-12)
    assert list(found.load_bytes) == problem.work.total.tolist()
    assert found.stall_s == pytest.approx(score.stall_s, rel=1e-9, abs=1e-12 * score.time_s)
    assert found.recompute_s == pytest.approx(score.recompute_s, rel=1e-12)
    fields = ("peak_bytes", "peak_op", "excess_bytes", "excess_sum_bytes", "host_excess_bytes", "disk_excess_bytes")
    assert [getattr(found.score, name) for name in fields] == [getattr(score, name) for name in fields]
    assert found.plain_time_s == problem.plain_time_s
    assert found.plain_peak_bytes == problem.plain_peak_bytes
    there = sum(problem.trace.buffers[id_].size_bytes for id_ in found.peak.tensors)
    assert there <= found.peak.size_bytes


def test_an_output_that_is_there_already_is_made_beside_it_for_one_moment():
    """A replay of an op with two outputs, whose next op reads the one that never left: it reads it where it is."""
    sizes = (8, 4, 2, 1)
    births, deaths = (0, 0, 1, 2), (5, 5, 5, 5)
    ops = [((), (0, 1)), ((1, 0), (2,)), ((), (3,)), ((), ()), ((0, 2), ())]
    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(id=i, storage_id=i, size_bytes=size, kind="activation", birth_op=birth, death_op=death)
            for i, (size, birth, death) in enumerate(zip(sizes, births, deaths, strict=True))
        ),
        ops=tuple(
            Op(
                index=i,
                name="aten.op.default",
                phase="forward" if i < 3 else "backward",
                reads=reads,
                writes=writes,
                workspace_bytes=16 * (i == 1),
                recomputable=True,
            )
            for i, (reads, writes) in enumerate(ops)
        ),
    )
    problem = PlanningProblem.of(trace, MACHINE, decision_class="extended", min_size_bytes=1)
    gone = {gap.buffer_id: index for index, gap in enumerate(problem.gaps)}
    codes = problem.keep_all()
    codes[[gone[0], gone[2]]] = Code.RECOMPUTE
    plan = problem.program(codes, 100)
    assert plan.replays == (Replay(at_op=4, ops=(0, 1)),)
    # 4 and 1 stay; the replay's first op makes 8, and 4 a second time; its second op 2, beside a workspace of 16.
    assert execute(trace, MACHINE, plan).load_bytes[4] == problem.work.total[4] == 15 + 16


def load_of(trace, plan):
    """The bytes at each op."""
    return execute(trace, MACHINE, plan).load_bytes


def with_absence(plan, index, **changes):
    """The plan with one absence changed."""
    absences = list(plan.absences)
    absences[index] = replace(absences[index], **changes)
    return replace(plan, absences=tuple(absences))


def end_of(trace, machine, plan, index, what):
    """When the copy of one absence ends. Buffers that are swapped more than once have their copies in order."""
    absence = plan.absences[index]
    of_same = [a for a in plan.absences if a.buffer_id == absence.buffer_id and a.action == "swap"]
    spans = [s for s in execute(trace, machine, plan).timeline if s.what == what and s.id == absence.buffer_id]
    return sorted(spans, key=lambda span: span.start_s)[of_same.index(absence)].end_s


@settings(max_examples=100)
@given(st.data(), problems())
def test_a_moment_that_is_moved_later_never_makes_memory_earlier(data, problem):
    """A later release holds no less at any op; a copy that is queued later does not end earlier, out or in."""
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    plan, trace, machine = problem.program(codes, budget_bytes), problem.trace, problem.machine
    assume(problem.score(codes, budget_bytes).time_s < float("inf"))
    swaps = [i for i, absence in enumerate(plan.absences) if absence.action == "swap"]
    assume(swaps)
    index = data.draw(st.sampled_from(swaps))
    absence = plan.absences[index]
    later = with_absence(plan, index, leave_op=data.draw(st.integers(absence.leave_op, absence.return_op)))
    assert all(after >= before for before, after in zip(load_of(trace, plan), load_of(trace, later), strict=True))
    if absence.next_use_op >= len(trace.ops):
        return  # what one step leaves to the next is another question
    later = with_absence(plan, index, return_op=data.draw(st.integers(absence.return_op, absence.next_use_op)))
    assert end_of(trace, machine, later, index, "swap-in") >= end_of(trace, machine, plan, index, "swap-in")
    roomy = with_absence(plan, index, leave_op=absence.return_op)
    out_op = data.draw(st.integers(absence.last_use_op, absence.return_op - 1))
    later = with_absence(roomy, index, out_op=out_op)
    assert end_of(trace, machine, later, index, "swap-out") >= end_of(trace, machine, roomy, index, "swap-out")


def plan_of(*absences, replays=(), synchronous=False):
    """A plan of the step."""
    header = PlanHeader(
        planner="by hand",
        decision_class="extended",
        machine="test",
        budget_bytes=2**40,
        num_ops=NUM_OPS,
        num_buffers=len(STEP.buffers),
        synchronous=synchronous,
    )
    return Plan(header=header, absences=absences, replays=replays)


def swap(**moments):
    """The first block's wide buffer, away between its last use in forward and its first one in backward."""
    usual = {"last_use_op": USES[1], "next_use_op": USES[2], "leave_op": USES[2], "return_op": USES[2]}
    return Absence(buffer_id=WIDE, action="swap", **(usual | moments))


def test_swaps_at_their_last_moment_cost_more_than_in_time():
    """The moments of a plan are priced: without prefetch compute waits for each copy in."""
    step = chain([(8 * MIB, 2e-2, 1e-4)] * 4)
    plan = schedule(step, MACHINE, [Decision(buffer_id=op.writes[0], action="swap") for op in step.ops[:9:3]])
    in_time = execute(step, MACHINE, plan)
    assert len(plan.absences) == 3
    assert in_time.time_s == pytest.approx(in_time.plain_time_s)
    late = tuple(replace(absence, return_op=absence.next_use_op) for absence in plan.absences)
    found = execute(step, MACHINE, replace(plan, absences=late))
    assert found.time_s == pytest.approx(found.plain_time_s + 3 * COPY_S)
    assert [stall.waited_for for stall in found.stalls] == ["in"] * 3


def test_compute_waits_where_memory_is_to_be_free():
    """Eight MiB take longer than the op after the last use: it waits for what is left of the copy."""
    found = execute(STEP, MACHINE, plan_of(swap(leave_op=USES[1] + 2, return_op=USES[2] - 1)))
    stall = found.stalls[0]
    assert (stall.op, stall.waited_for, stall.buffer_id) == (USES[1] + 2, "out", WIDE)
    assert stall.time_s == pytest.approx(COPY_S - STEP.ops[USES[1] + 1].time_s)
    assert found.load_bytes[USES[1] + 2] == execute(STEP, MACHINE, plan_of()).load_bytes[USES[1] + 2] - 8 * MIB


def test_a_late_eviction_begins_when_it_says():
    """The copy out starts after `out_op`, and not before."""
    out_op = USES[1] + 3
    found = execute(STEP, MACHINE, plan_of(swap(out_op=out_op)))
    start_s = next(span.start_s for span in found.timeline if span.what == "swap-out")
    assert start_s == pytest.approx(sum(op.time_s for op in STEP.ops[: out_op + 1]))
    assert found.host_peak_bytes == 8 * MIB


def test_copies_in_of_one_op_go_by_their_rank():
    """The one that is needed first waits for the one with the lower rank."""
    ids = [STEP.ops[0].writes[0], STEP.ops[3].writes[0]]
    plan = schedule(STEP, MACHINE, [Decision(buffer_id=id_, action="swap") for id_ in ids])
    at = min(absence.next_use_op for absence in plan.absences)
    for ranks in ((0, 1), (1, 0)):
        absences = tuple(
            replace(absence, return_op=at, return_rank=rank) for absence, rank in zip(plan.absences, ranks, strict=True)
        )
        timeline = execute(STEP, MACHINE, replace(plan, absences=absences)).timeline
        order = [span.id for span in timeline if span.what == "swap-in"]
        assert order == [absence.buffer_id for absence in sorted(absences, key=lambda a: a.return_rank)]


def test_a_synchronous_runtime_waits_for_each_copy():
    """Once out and once in."""
    found = execute(STEP, MACHINE, plan_of(swap(), synchronous=True))
    assert found.time_s == pytest.approx(found.plain_time_s + 2 * COPY_S)


def test_a_replay_that_is_issued_ahead_runs_there():
    """It takes the same time, and its memory from its own moment on."""
    drop = Absence(
        buffer_id=WIDE,
        last_use_op=USES[1],
        next_use_op=USES[2],
        action="recompute",
        leave_op=USES[1] + 1,
        return_op=USES[2] - 2,
    )
    found = execute(STEP, MACHINE, plan_of(drop, replays=(Replay(at_op=USES[2] - 2, ops=(0,)),)))
    (span,) = [span for span in found.timeline if span.what == "replay"]
    assert span.id == USES[2] - 2
    assert found.time_s == pytest.approx(found.plain_time_s + STEP.ops[0].time_s)
    plain = execute(STEP, MACHINE, plan_of())
    away = [op for op in range(NUM_OPS) if found.load_bytes[op] < plain.load_bytes[op]]
    assert away == list(range(USES[1] + 1, USES[2] - 2))


def test_what_is_written_of_the_next_step_is_waited_for_at_the_end():
    """A momentum whose copy is not said to be carried over ends with the step; one that is goes on in the next."""
    step = chain([(8 * MIB, 8e-3, 1e-4)] * 2, optimizer=True, weight_bytes=4 * MIB)
    num_ops, over_end = len(step.ops), versions_over_end(step)
    states = [step.buffers[id_] for id_ in over_end if step.buffers[id_].kind == "optimizer_state"]
    last = max(states, key=lambda buffer: buffer.birth_op)
    used = min(op.index for op in step.ops if over_end[last.id].id in op.reads)
    away = Absence(
        buffer_id=last.id,
        last_use_op=last.birth_op,
        next_use_op=num_ops + used,
        action="swap",
        leave_op=num_ops + used,
        return_op=num_ops + used,
    )
    header = replace(plan_of().header, num_ops=num_ops, num_buffers=len(step.buffers), decision_class="all")
    copy_s = 4 * MIB / 1e9
    left_s = copy_s - sum(op.time_s for op in step.ops[last.birth_op + 1 :])
    waits = execute(step, MACHINE, Plan(header=header, absences=(away,)))
    assert waits.stalls[-1].waited_for == "out"
    assert sum(stall.time_s for stall in waits.stalls if stall.waited_for == "out") == pytest.approx(left_s)
    carried = execute(step, MACHINE, Plan(header=header, absences=(replace(away, carried_s=copy_s),)))
    assert not [stall for stall in carried.stalls if stall.waited_for == "out"]
    # Said to take less than it does: what is carried is what the step leaves.
    short = execute(step, MACHINE, Plan(header=header, absences=(replace(away, carried_s=copy_s / 1e6),)))
    assert short.time_s == pytest.approx(carried.time_s)
    assert short.time_s < waits.time_s


def test_a_copy_in_that_is_queued_before_the_end_is_waited_for_at_the_end_alone():
    """However late its use in the next step is said to be: this step does not wait before the op of that number."""
    step = chain([(8 * MIB, 8e-3, 1e-4)] * 3, weight_bytes=16 * MIB)
    num_ops = len(step.ops)
    leave_op, return_op = num_ops - 2, num_ops - 1  # of the first weight, which backward does not read
    away = Absence(
        buffer_id=0, last_use_op=0, next_use_op=num_ops, action="swap", leave_op=leave_op, return_op=return_op
    )
    header = replace(plan_of().header, num_ops=num_ops, num_buffers=len(step.buffers), decision_class="all")
    first, late = (
        execute(step, MACHINE, Plan(header=header, absences=(replace(away, next_use_op=next_use_op),)))
        for next_use_op in (num_ops, 2 * num_ops - 1)
    )
    (stall,) = late.stalls
    assert (stall.op, stall.waited_for) == (num_ops - 1, "in")
    assert late.time_s == first.time_s


def test_a_plan_of_another_trace_is_refused():
    """By its numbers of ops and buffers."""
    plan = plan_of()
    with pytest.raises(PlanError, match="belongs to another trace"):
        execute(STEP, MACHINE, replace(plan, header=replace(plan.header, num_ops=3)))


def test_parts_within_the_step_carry_their_own_moments():
    """What the following step finds counts from its own beginning."""
    step = chain([(MIB, 1e-3, 1e-4)] * 2, optimizer=True)
    over_end = versions_over_end(step)
    last = step.buffers[max(over_end)]
    num_ops = len(step.ops)
    away = msgspec.structs.replace(swap(), buffer_id=last.id, next_use_op=num_ops + 2, leave_op=num_ops - 1)
    first, _ = parts_within_step(step, replace(away, return_op=num_ops + 1), over_end)
    assert (first.leave_op, first.return_op, first.next_use_op) == (0, 1, 2)
