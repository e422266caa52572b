"""Plans bound the load; with the pool they bound the footprint."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.simulate.test_against_validator import DISKY, some_codes
from torchdelta import planners
from torchdelta.errors import InfeasibleError
from torchdelta.plan.over_end import parts_within_step
from torchdelta.plan.validate import validate
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.lives import lives_of_trace
from torchdelta.pool.planned import lives_of_plan, plan_within_footprint
from torchdelta.pool.validate import check
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Trace, peak, versions_over_end
from torchdelta.units import format_bytes

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4)


@settings(max_examples=60, deadline=None)
@given(st.data(), blocks(), st.sampled_from(["saved", "extended"]))
def test_the_load_of_the_lives_is_the_peak_of_the_plan(data, drawn, decision_class):
    """To the byte, under any decisions: the simulator, the validator and the pool count the same."""
    trace = chain(drawn)
    problem = PlanningProblem.of(trace, DISKY, decision_class=decision_class, min_size_bytes=1)
    found = problem.simulation(some_codes(data.draw, problem), problem.plain_peak_bytes)
    if found.time_s == float("inf"):
        return
    assert max_load_bytes(lives_of_plan(trace, found.plan)) == found.peak.size_bytes


@settings(max_examples=60, deadline=None)
@given(st.data(), blocks())
def test_lives_over_the_end_are_one_place(data, drawn):
    """In the class *all* the load is never below the peak, and equal where no storage is there in two pieces."""
    trace = chain(drawn, optimizer=True)
    problem = PlanningProblem.of(trace, DISKY, decision_class="all", min_size_bytes=1)
    found = problem.simulation(some_codes(data.draw, problem), problem.plain_peak_bytes)
    if found.time_s == float("inf"):
        return
    lives = lives_of_plan(trace, found.plan)
    apart = _lives_apart(trace, found.plan)
    assert len(lives.ids) == len(set(lives.ids))
    if apart:
        assert max_load_bytes(lives) >= found.peak.size_bytes
    else:
        assert max_load_bytes(lives) == found.peak.size_bytes


def _lives_apart(trace, plan):
    """The storages that are there when the step begins and when it ends, and away in between."""
    num_ops, apart = len(trace.ops), set()
    for last_id, first in versions_over_end(trace).items():
        mine = [a for a in plan.absences if trace.buffers[a.buffer_id].storage_id == first.storage_id]
        parts = [part for a in mine for part in parts_within_step(trace, a, {last_id: first})]
        ends_away = any(part.leave_op < num_ops == part.return_op for part in parts)
        begins_away = any(part.leave_op == 0 for part in parts)
        if any(part.leave_op < part.return_op for part in parts) and not ends_away and not begins_away:
            apart.add(last_id)
    return apart


def test_a_parameter_that_was_away_in_between_is_one_life():
    """What the step ends with is where the next one begins: not two lives with two addresses."""
    trace = chain([(8 * MIB, 2e-3, 1e-4)] * 3, optimizer=True)
    problem = PlanningProblem.of(trace, MACHINE, decision_class="all", min_size_bytes=1)
    codes = problem.keep_all()
    gap = next(i for i, gap in enumerate(problem.gaps) if trace.buffers[gap.buffer_id].kind == "parameter")
    assert problem.gaps[gap].next_use_op < len(trace.ops)
    codes[gap] = Code.SWAP
    lives = lives_of_plan(trace, problem.simulation(codes, problem.plain_peak_bytes).plan)
    plain = lives_of_plan(trace, problem.simulation(problem.keep_all(), problem.plain_peak_bytes).plan)
    assert len(lives.ids) == len(plain.ids)


def test_a_swap_that_frees_nothing_leaves_no_address():
    """Its copy has just ended when it comes back, here once in the step and once over its end: one life, one place."""
    trace = chain([(MIB, 1e-4, 1e-4)] * 3, optimizer=True)
    problem = PlanningProblem.of(trace, DISKY, decision_class="all", min_size_bytes=1)
    codes = problem.keep_all()
    for gap, where in enumerate(problem.gaps):
        if trace.buffers[where.buffer_id].storage_id == 1 and where.last_use_op >= 16:
            codes[gap] = Code.SWAP
    found = problem.simulation(codes, problem.plain_peak_bytes)
    assert [absence.leave_op - absence.return_op for absence in found.plan.absences] == [0, 0]
    lives, plain = (lives_of_plan(trace, plan) for plan in (found.plan, replace(found.plan, absences=())))
    assert lives.ids == plain.ids
    assert max_load_bytes(lives) == found.peak.size_bytes


def test_without_a_plan_the_load_is_the_traces():
    """An empty plan leaves every life as it is."""
    size_bytes = peak(STEP, with_workspace=True).size_bytes
    plan = planners.get("keep")(STEP, MACHINE, size_bytes, "fast")
    assert max_load_bytes(lives_of_plan(STEP, plan)) == size_bytes


@pytest.mark.parametrize(
    ("name", "share"), [("torchdelta", 0.8), ("torchdelta", 0.55), ("checkpoint", 0.8), ("swap-all", 0.55)]
)
def test_the_footprint_is_within_the_budget(name, share):
    """With room for alignment; the plan is valid, and so is the placement."""
    budget_bytes = int(share * peak(STEP, with_workspace=True).size_bytes)
    found = plan_within_footprint(
        STEP, budget_bytes, lambda size: planners.get(name)(STEP, MACHINE, size, "fast"), alignment_bytes=512
    )
    validate(STEP, found.plan)
    check(lives_of_plan(STEP, found.plan, alignment_bytes=512), found.placement.offsets_bytes)
    assert found.placement.footprint_bytes <= budget_bytes


def test_a_budget_that_no_plan_holds_is_the_planners_to_refuse():
    """Its error passes through."""
    with pytest.raises(InfeasibleError):
        plan_within_footprint(STEP, 1000, lambda size: planners.get("torchdelta")(STEP, MACHINE, size, "fast"))


def test_plans_that_never_fit_end_in_an_error():
    """A planner that does not listen is asked twelve times."""
    size_bytes = peak(STEP, with_workspace=True).size_bytes
    plan = planners.get("keep")(STEP, MACHINE, size_bytes, "fast")
    asked = []
    with pytest.raises(InfeasibleError, match="the last of 12 plans"):
        plan_within_footprint(STEP, size_bytes - 4 * MIB, lambda size: asked.append(size) or plan)
    assert len(asked) == 12


def test_a_planner_that_has_nothing_smaller_ends_in_an_error():
    """One line with what the placement needed, and where to look."""
    size_bytes = peak(STEP, with_workspace=True).size_bytes
    plan = planners.get("keep")(STEP, MACHINE, size_bytes, "fast")
    budget_bytes = size_bytes - 4 * MIB

    def choose(size: int):
        if size < budget_bytes:
            raise InfeasibleError("no plan that small", least_budget_bytes=None)
        return plan

    with pytest.raises(
        InfeasibleError, match=rf"needs {format_bytes(size_bytes)}, and for less no plan that small; .*extended"
    ):
        plan_within_footprint(STEP, budget_bytes, choose)


def left_over(last_op):
    """Return a step that makes an output, while that of the step before lives up to an op, as in `out = model(x)`."""
    buffers = [(1, BEFORE_STEP, 4), (100, BEFORE_STEP, last_op), (100, 1, 4), (100, 2, 3)]
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(id=id_, storage_id=id_, size_bytes=size * MIB, kind="activation", birth_op=birth, death_op=death)
            for id_, (size, birth, death) in enumerate(buffers)
        ),
        ops=tuple(
            Op(
                index=index,
                name="aten.mul.Tensor",
                phase="forward",
                reads=(0,),
                writes=(index + 1,) if index in {1, 2} else (),
                time_s=1.0,
            )
            for index in range(4)
        ),
    )


@pytest.mark.parametrize(("last_op", "load"), [(1, 201), (2, 301)])
def test_what_outlives_the_step_takes_the_place_of_what_is_left_over(last_op, load):
    """In one place if the old one is gone when the new one is made, else in two that take turns."""
    trace = left_over(last_op)
    plan = planners.get("keep")(trace, MACHINE, 400 * MIB)
    assert max_load_bytes(lives_of_trace(trace)) == load * MIB
    assert max_load_bytes(lives_of_plan(trace, plan)) == load * MIB
    pooled = plan_within_footprint(
        trace, load * MIB, lambda size_bytes: planners.get("keep")(trace, MACHINE, size_bytes)
    )
    assert pooled.placement.footprint_bytes == load * MIB
