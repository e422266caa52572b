"""The plan of an online policy is the program that was played: moments made by hand, and what holds of every play."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.plan import second_implementation
from tests.planners import steps
from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.trace.strategies import traces
from torchdelta.errors import InfeasibleError
from torchdelta.plan.file import read_plan, write_plan
from torchdelta.plan.model import Absence, Keep, Replay
from torchdelta.plan.validate import find_fault
from torchdelta.planners import get
from torchdelta.planners.literature import delta_2022, delta_2022_released, dtr
from torchdelta.planners.literature.online import NoCandidateError, Play
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.simulate import Options, execute, simulate_plan
from torchdelta.trace.file import write_trace
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Trace, peak

PLAYED = {module.PLAYED.name: module.PLAYED for module in (dtr, delta_2022, delta_2022_released)}
SHARED = replace(
    MACHINE,
    both_ways_factor=0.7,
    link_latency_s=1e-5,
    out_compute_s_per_byte=4e-10,
    in_compute_s_per_byte=2e-10,
    copy_compute_s=3e-5,
    replay_compute_s=7e-5,
)


def step(ops, small=()):
    """Return a step of ops `(reads, writes, seconds)` over buffers of one letter, 1 MiB each; `small` ones have 4 B.

    What no op writes is there before the step and outlives it; the rest dies after its last use.
    """
    names = list(dict.fromkeys("".join(reads + writes for reads, writes, _ in ops)))
    births = {name: index for index, (_, writes, _) in enumerate(ops) for name in writes}
    deaths = {name: index + 1 for index, (reads, writes, _) in enumerate(ops) for name in reads + writes}
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(
                id=id_,
                storage_id=id_,
                size_bytes=4 if name in small else MIB,
                kind="activation" if name in births else "input",
                birth_op=births.get(name, BEFORE_STEP),
                death_op=deaths[name] if name in births else len(ops),
            )
            for id_, name in enumerate(names)
        ),
        ops=tuple(
            Op(
                index=index,
                name="aten.mm.default",
                phase="forward",
                reads=tuple(map(names.index, reads)),
                writes=tuple(map(names.index, writes)),
                time_s=time_s,
                recomputable=True,
            )
            for index, (reads, writes, time_s) in enumerate(ops)
        ),
    )


# x a b c: a forward of three ops, whose loss l starts a backward that reads c, b and a. Plain it holds five at once.
SMALL = step(
    [("x", "a", 1), ("a", "b", 10), ("b", "c", 1), ("c", "l", 1), ("lc", "g", 1), ("gb", "h", 1), ("ha", "i", 1)], "l"
)
FOUR = 4 * MIB + 8
A, B = 1, 2
COPY_S = MIB / 1e9


def test_dtr_drops_what_is_cheap_and_stale_when_memory_is_short():
    """At op 4: `a` takes 1 s to make and is 2 s old, `b` 10 s and 1 s, and `c` is read; op 6 reads `a` again."""
    plan = get("dtr")(SMALL, MACHINE, FOUR)
    assert plan.absences == (
        Absence(buffer_id=A, last_use_op=1, next_use_op=6, action="recompute", leave_op=4, return_op=6),
    )
    assert plan.replays == (Replay(at_op=6, ops=(0,)),)
    assert execute(SMALL, MACHINE, plan).time_s == pytest.approx(16 + 1)


@pytest.mark.parametrize("name", PLAYED)
def test_what_the_step_has_freed_is_no_source_of_a_replay(name):
    """The input `x` dies after op 0, so `a` cannot be made again: it is swapped, or `b` goes, made from it."""
    freed = replace(SMALL, buffers=(replace(SMALL.buffers[0], death_op=1), *SMALL.buffers[1:]))
    budget_bytes = peak(freed).size_bytes - MIB // 2
    try:
        plan = get(name)(freed, MACHINE, budget_bytes)
    except InfeasibleError:
        assert name == "dtr"  # which swaps nothing
        return
    assert find_fault(freed, plan) is None
    assert all(0 not in replay.ops for replay in plan.replays)
    assert execute(freed, MACHINE, plan).peak.size_bytes <= budget_bytes


def test_delta_swaps_it_and_waits_for_both_copies():
    """The filter takes the stalest, too, and a copy of a millisecond is cheaper than an op of a second."""
    plan = get("delta-2022")(SMALL, MACHINE, FOUR)
    moments = {"last_use_op": 1, "out_op": 3, "leave_op": 4, "return_op": 6, "next_use_op": 6}
    assert plan.absences == (Absence(buffer_id=A, action="swap", **moments),)
    assert plan.replays == ()
    assert execute(SMALL, MACHINE, plan).time_s == pytest.approx(16 + 2 * COPY_S)


def test_the_released_code_swaps_after_the_op_that_passed_the_limit():
    """Its limit is lower than the budget by what an op adds: `a` is away once op 3 has run, before memory is short."""
    plan = get("delta-2022-released")(SMALL, MACHINE, FOUR)
    assert plan.header.synchronous
    assert [(absence.buffer_id, absence.action) for absence in plan.absences] == [(A, "swap")]
    assert plan.absences[0].leave_op <= 4
    assert execute(SMALL, MACHINE, plan).peak.size_bytes <= FOUR


def test_a_step_too_wide_for_the_rule_names_the_least_budget():
    """At three, `b` and what it is made from do not fit beside what op 5 reads."""
    for name in ("dtr", "delta-2022"):
        with pytest.raises(InfeasibleError) as caught:
            get(name)(SMALL, replace(MACHINE, host_out_bytes_per_s=1.0, host_in_bytes_per_s=1.0), 3 * MIB + 8)
        least_bytes = caught.value.least_budget_bytes
        assert 3 * MIB + 8 < least_bytes <= peak(SMALL, with_workspace=True).size_bytes
        assert get(name)(SMALL, MACHINE, least_bytes)


# Two large forwards that are needed in reverse: the second one's use fetches the first one ahead.
TWO = step(
    [
        ("x", "a", 1),
        ("a", "b", 1),
        ("b", "c", 1),
        ("c", "d", 1),
        ("d", "e", 1),
        ("e", "l", 1),
        ("lb", "m", 1),
        ("m", "n", 1),
        ("na", "o", 1),
    ],
    "lmno",
)


def test_delta_fetches_ahead_what_left_last_once_a_swapped_buffer_is_used():
    """`a` leaves at op 2, `b` at op 3; op 6 waits for `b` and has `a` under way, which op 8 then need not wait for."""
    plan = get("delta-2022")(TWO, MACHINE, 3 * MIB + 64)
    moments = [(a.buffer_id, a.last_use_op, a.out_op, a.leave_op, a.return_op, a.next_use_op) for a in plan.absences]
    assert moments == [(A, 1, 1, 2, 6, 8), (B, 2, 2, 3, 6, 6)]
    assert [absence.return_rank for absence in plan.absences] == [1, 0]
    assert execute(TWO, MACHINE, plan).time_s == pytest.approx(9 + 3 * COPY_S)


# A chain of which only the last is read again: what its replay makes on the way is dead, and read by a later replay.
DEAD = step(
    [
        ("x", "a", 1),
        ("a", "b", 1),
        ("b", "c", 1),
        ("b", "d", 1),
        ("x", "w", 1),
        ("w", "v", 1),
        ("cv", "l", 1),
        ("dl", "m", 1),
    ],
    "lm",
)


def test_dtr_leaves_a_dead_result_of_a_replay_for_the_next_one():
    """Both `c` and `d` are dropped and made from `b`, which is dead: `c`'s replay makes it, and `d`'s finds it."""
    plan = get("dtr")(DEAD, MACHINE, 4 * MIB + 64)
    moments = [(a.buffer_id, a.last_use_op, a.leave_op, a.return_op, a.next_use_op) for a in plan.absences]
    assert moments == [(3, 2, 5, 6, 6), (4, 3, 6, 7, 7)]
    keep = Keep(buffer_id=B, until_op=len(DEAD.ops))
    assert plan.replays == (Replay(at_op=6, ops=(0, 1, 2), keeps=(keep,)), Replay(at_op=7, ops=(3,)))


def price(trace, plan):
    """Return peak and time as the second implementation has them, from files that hold what was written."""
    with tempfile.TemporaryDirectory() as folder:
        trace_path, plan_path = Path(folder) / "step.trace", Path(folder) / "step.plan"
        write_trace(trace, trace_path)
        write_plan(plan, plan_path)
        assert read_plan(plan_path) == plan
        return second_implementation.simulate(trace_path, plan_path)


def check(trace, machine, name, limit_bytes):
    """Play once; the program is valid, costs what the play lived through, holds its limit, and survives a file.

    A second implementation of the page on plans agrees. Return the plan, None where nothing was left to evict.
    """
    planner, played_step = PLAYED[name], PlayedStep(trace)
    soft = planner.soft
    policy = planner.policy(played_step, machine)
    play = Play(played_step, machine, limit_bytes, policy, soft=soft, synchronous=planner.synchronous)
    try:
        program = play.run()
    except NoCandidateError:
        assert not soft
        return None
    plan = program.plan(machine, limit_bytes, name, synchronous=planner.synchronous)
    found = execute(trace, machine, plan)
    assert found.time_s == pytest.approx(play.clock_s, rel=1e-12)
    assert soft or found.peak.size_bytes <= limit_bytes
    within = replace(plan, header=replace(plan.header, budget_bytes=max(limit_bytes, found.peak.size_bytes)))
    assert find_fault(trace, within, None) is None
    if name == "dtr":
        assert all(absence.action == "recompute" for absence in plan.absences)
    assert price(trace, plan) == (found.peak.size_bytes, pytest.approx(found.time_s, rel=1e-9))
    return plan


@pytest.mark.rest
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    trace=st.booleans().flatmap(lambda lasting: traces(max_ops=20, lasting=lasting, resize=True)),
    name=st.sampled_from(list(PLAYED)),
    percent=st.integers(20, 100),
    machine=st.sampled_from([MACHINE, SHARED]),
)
def test_plays_of_random_steps(trace, name, percent, machine):
    """Whatever may stand in a trace."""
    check(trace, machine, name, peak(trace, with_workspace=True).size_bytes * percent // 100)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=blocks().map(lambda drawn: drawn * 2),
    name=st.sampled_from(list(PLAYED)),
    percent=st.integers(25, 90),
    link=st.sampled_from([1e8, 1e9, 1e11]),
    skips=st.booleans(),
)
def test_plays_of_networks_made_by_hand(drawn, name, percent, link, skips):
    """Chains with much to evict, on slow and fast links that both directions share."""
    trace = chain(drawn, skips=skips)
    machine = replace(SHARED, host_out_bytes_per_s=link, host_in_bytes_per_s=link)
    check(trace, machine, name, peak(trace, with_workspace=True).size_bytes * percent // 100)


def tight(name):
    """Return twelve blocks in a row, and what a policy does with 40 % of their peak."""
    trace = chain([(8 * MIB, 2e-3, 2e-4), (4 * MIB, 8e-3, 5e-4)] * 6)
    return trace, get(name)(trace, MACHINE, peak(trace, with_workspace=True).size_bytes * 40 // 100)


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("model", steps.STEPS)
def test_plays_of_real_steps(name, model):
    """A transformer, a ResNet and a U-Net from roomy to tight."""
    trace = steps.real_step(model)
    plain_bytes = peak(trace, with_workspace=True).size_bytes
    assert any(check(trace, steps.MACHINE, name, plain_bytes * percent // 100) for percent in (90, 60, 45, 30))


def test_moments_are_the_plays_own():
    """Buffers leave late in a gap, and what replays make stays: a plan of whole gaps cannot say so."""
    _, plan = tight("dtr")
    assert any(absence.leave_op > absence.last_use_op + 1 for absence in plan.absences)
    assert any(replay.keeps for replay in plan.replays)


@pytest.mark.parametrize("name", ["dtr", "delta-2022"])
def test_squeezed_to_whole_gaps_a_play_is_slower(name):
    """The control: who left in a gap leaves for all of it, and the simulator chooses the moments."""
    trace, plan = tight(name)
    squeezed = simulate_plan(trace, MACHINE, plan, options=Options())
    played = execute(trace, MACHINE, plan)
    assert played.score.is_feasible
    assert squeezed.overhead > 1.1 * played.overhead
