"""The default planner: deterministic, dearer with less room, and never worse with more freedom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planners.chains import MACHINE, MIB, blocks, chain
from torchdelta import planners
from torchdelta.errors import InfeasibleError
from torchdelta.plan.validate import validate
from torchdelta.planners import search
from torchdelta.planners.torchdelta import choose, least_peak
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4)


@settings(max_examples=8, deadline=None)
@given(blocks())
def test_the_price_never_falls_with_the_budget(drawn):
    """A smaller budget never takes less time, but for 0.2 points."""
    problem = Problem.of(chain(drawn), MACHINE)
    floor = least_peak(problem)
    before_s = 0.0
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        budget_bytes = int(floor + share * (problem.plain_peak_bytes - floor))
        score = problem.score(choose(problem, budget_bytes, "best"), budget_bytes)
        assert score.is_feasible
        assert score.time_s >= before_s - 0.002 * problem.plain_time_s
        before_s = max(before_s, score.time_s)


@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_two_changes_at_once_hold_the_budget_and_cost_no_more(drawn, share):
    """Exchanges start from any decision that holds the budget, and only ever save time."""
    problem = Problem.of(chain(drawn), MACHINE)
    floor = least_peak(problem)
    budget_bytes = int(floor + share * (problem.plain_peak_bytes - floor))
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    allowed = np.zeros((len(codes), len(Code)), np.bool_)
    allowed[:, [Code.KEEP, Code.SWAP]] = True
    before = problem.score(codes, budget_bytes)
    found = search.exchange(problem.static, problem.work, codes, problem.limits(budget_bytes), allowed, 10_000)
    after = problem.score(codes, budget_bytes)
    assert after.is_feasible
    assert after.time_s <= before.time_s
    assert found == (0, after.time_s)


@pytest.mark.parametrize("name", ["torchdelta", "torchdelta-extended", "torchdelta-all"])
@pytest.mark.parametrize("effort", ["fast", "best"])
def test_the_same_question_has_the_same_answer(name, effort):
    """Two calls give the same plan, to the last op."""
    planner = planners.get(name)
    budget_bytes = Problem.of(STEP, MACHINE).plain_peak_bytes * 6 // 10
    plan = planner(STEP, MACHINE, budget_bytes, effort)
    assert plan == planner(STEP, MACHINE, budget_bytes, effort)
    validate(STEP, plan, MACHINE)
    assert plan.header.planner == name


def test_what_fits_is_left_alone():
    """At the plain peak the plan is empty."""
    assert not planners.get("torchdelta")(STEP, MACHINE, Problem.of(STEP, MACHINE).plain_peak_bytes).absences


def test_the_least_budget_that_the_error_names_works():
    """Below the least peak it is an error whose number can be used at once."""
    planner = planners.get("torchdelta")
    with pytest.raises(InfeasibleError) as caught:
        planner(STEP, MACHINE, 1000)
    assert caught.value.least_budget_bytes is not None
    assert planner(STEP, MACHINE, caught.value.least_budget_bytes).absences


@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_more_freedom_is_never_worse(drawn, share):
    """The class *extended* starts from the answer in *saved*."""
    trace = chain(drawn)
    problem = Problem.of(trace, MACHINE)
    floor = least_peak(problem)
    budget_bytes = int(floor + share * (problem.plain_peak_bytes - floor))
    extended = Problem.of(trace, MACHINE, decision_class="extended")
    place = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(extended.gaps)}
    start = extended.keep_all()
    codes = choose(problem, budget_bytes, "fast")
    for gap, code in zip(problem.gaps, codes, strict=True):
        start[place[gap.buffer_id, gap.last_use_op]] = code
    found = extended.score(choose(extended, budget_bytes, "fast", start=start), budget_bytes)
    assert found.time_s <= problem.score(codes, budget_bytes).time_s * (1 + 1e-9)
