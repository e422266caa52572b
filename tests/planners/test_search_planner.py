"""The default planner: deterministic, dearer with less room, and never worse with more freedom."""

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.sampling import keep
from torchdelta import planners
from torchdelta.errors import InfeasibleError
from torchdelta.plan.validate import validate
from torchdelta.planners.default import moves
from torchdelta.planners.default.anneal import anneal
from torchdelta.planners.default.search_planner import choose
from torchdelta.planners.default.windows import try_windows
from torchdelta.planners.problem_within import least_peak
from torchdelta.simulate import simulate_plan
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4)


def _budget_bytes(problem: PlanningProblem, share: float) -> int:
    """Return a budget between the least peak (0) and what the plain step takes (1)."""
    floor = least_peak(problem)
    return int(floor + share * (problem.plain_peak_bytes - floor))


@pytest.mark.rest
@settings(max_examples=8, deadline=None)
@given(blocks())
def test_the_price_never_falls_with_the_budget(drawn):
    """A smaller budget never takes less time, but for 0.2 points."""
    problem = PlanningProblem.of(chain(drawn), MACHINE)
    before_s = 0.0
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        budget_bytes = _budget_bytes(problem, share)
        score = problem.score(choose(problem, budget_bytes, "best"), budget_bytes)
        assert score.is_feasible
        assert score.time_s >= before_s - 0.002 * problem.plain_time_s
        before_s = max(before_s, score.time_s)


@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_two_changes_at_once_hold_the_budget_and_cost_no_more(drawn, share):
    """Exchanges start from any decision that holds the budget, and only ever save time."""
    problem = PlanningProblem.of(chain(drawn), MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    allowed = np.zeros((len(codes), len(Code)), np.bool_)
    allowed[:, [Code.KEEP, Code.SWAP]] = True
    before = problem.score(codes, budget_bytes)
    found = moves.exchange(problem.static, problem.work, codes, problem.limits(budget_bytes), allowed, 10_000)
    after = problem.score(codes, budget_bytes)
    assert after.is_feasible
    assert after.time_s <= before.time_s
    assert found == (0, after.time_s)


def _allowed(problem: PlanningProblem):
    """Return which codes of the class *saved* each gap may take."""
    allowed = np.zeros((len(problem.gaps), len(Code)), np.bool_)
    allowed[:, [Code.KEEP, Code.SWAP]] = True
    allowed[:, Code.RECOMPUTE] = [gap.can_recompute for gap in problem.gaps]
    return allowed


def _least_time_s(problem: PlanningProblem, budget_bytes: int) -> float:
    """Return the time of the best decision, by trying all."""
    everything = product(*[np.flatnonzero(codes) for codes in _allowed(problem)])
    scores = [problem.score(np.array(each, np.int8), budget_bytes) for each in everything]
    return min(score.time_s for score in scores if score.is_feasible)


def test_what_fits_at_last_by_a_swap_is_compared_with_recomputing():
    """The first code that holds the budget is not the answer: a later one of the same gap may be faster."""
    slow = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
    problem = PlanningProblem.of(STEP, slow)
    limits, order = problem.limits(problem.plain_peak_bytes - 1), np.arange(len(problem.gaps), dtype=np.int64)
    codes = problem.keep_all()
    found = moves.improve(problem.static, problem.work, codes, limits, _allowed(problem), order, 1)
    assert found[0] == 0
    assert np.count_nonzero(codes == Code.SWAP) == 0
    assert found[1] < 1.1 * problem.plain_time_s


@pytest.mark.rest
@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_releases_may_share_their_first_prices(drawn, share):
    """What each gap alone would lead to is simulated once for several starts, and leads each to where its own would."""
    problem = PlanningProblem.of(chain(drawn), MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    limits, allowed = problem.limits(budget_bytes), _allowed(problem)
    everyone = np.arange(len(problem.gaps), dtype=np.int64)
    prices = moves.price_each(problem.static, problem.work, problem.keep_all(), limits, allowed, everyone)
    for gap, code in np.argwhere(allowed):
        codes = problem.keep_all()
        codes[gap] = code
        score = problem.score(codes, budget_bytes)
        expected = (score.excess_sum_bytes, score.time_s) if code != Code.KEEP else (np.inf, np.inf)
        assert tuple(prices[:, gap, code]) == expected
    for link_price, neighbours in ((0.0, 1), (0.3, 0)):
        ends = []
        for first_prices in (prices, moves.UNPRICED):
            codes = problem.keep_all()
            rest = (limits, allowed, everyone, link_price, neighbours, first_prices)
            found = moves.release(problem.static, problem.work, codes, *rest)
            score = problem.score(codes, budget_bytes)
            assert found == (score.excess_sum_bytes, score.time_s)
            ends.append(codes.tolist())
        assert ends[0] == ends[1]


@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_a_window_over_everything_is_an_exhaustive_search(drawn, share):
    """No combination of the codes that are allowed is better than what a window as wide as the step ends with."""
    problem = PlanningProblem.of(chain(drawn[:3]), MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    order = np.arange(len(codes), dtype=np.int64)
    found = try_windows(
        problem.static, problem.work, codes, problem.limits(budget_bytes), _allowed(problem), order, len(order), 1
    )
    assert found[0] == 0
    assert found[1] == pytest.approx(_least_time_s(problem, budget_bytes), rel=1e-8)
    assert problem.score(codes, budget_bytes).time_s == found[1]


@pytest.mark.rest
@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_annealing_finds_the_best_decision_of_a_small_step(drawn, share):
    """From everything on the device, which does not fit; every run ends within the budget, equal ones with the same."""
    problem = PlanningProblem.of(chain(drawn[:3]), MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    order = np.arange(len(problem.gaps), dtype=np.int64)
    limits, allowed = problem.limits(budget_bytes), _allowed(problem)
    answers = []
    for seed in (1, 1, 2, 3, 4):
        codes = problem.keep_all()
        rest = (limits, allowed, order, problem.plain_time_s, (0.1, 1e-4), 6000, seed)
        found = anneal(problem.static, problem.work, codes, *rest)
        assert found == (0, problem.score(codes, budget_bytes).time_s)
        answers.append((found, codes.tolist()))
    assert answers[0] == answers[1]
    assert min(answers)[0][1] == pytest.approx(_least_time_s(problem, budget_bytes), rel=1e-8)


def test_where_memory_is_short_large_buffers_are_decided_first(monkeypatch):
    """Of eight blocks with large outputs one that is swapped had better stay: `fast` finds that by deciding anew."""
    drawn = [(4, 2e-3, 5e-4), (8, 2e-3, 1e-3), (4, 2e-3, 1e-3), (16, 2e-3, 1e-4)]
    drawn += [(16, 1e-3, 1e-3), (4, 2e-3, 5e-4), (8, 4e-3, 1e-3), (16, 1e-3, 5e-4)]
    problem = PlanningProblem.of(chain([(size * MIB, *times_s) for size, *times_s in drawn]), MACHINE)
    budget_bytes = int(1.3 * least_peak(problem))
    with_it = problem.score(choose(problem, budget_bytes, "fast"), budget_bytes)
    monkeypatch.setattr("torchdelta.planners.default.search.Search.rebuild", lambda _search: None)
    without = problem.score(choose(problem, budget_bytes, "fast"), budget_bytes)
    assert with_it.is_feasible
    assert with_it.time_s < without.time_s


def test_annealing_below_the_least_peak_leaves_the_decision_as_it_was():
    """Nothing fits there, so there is nothing to put in its place; gaps that may not change do not."""
    problem = PlanningProblem.of(STEP, MACHINE)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    order = np.arange(1, len(codes), dtype=np.int64)
    floor = least_peak(problem)
    arguments = (_allowed(problem), order, problem.plain_time_s, (0.1, 1e-4), 500, 0)
    excess, time_s = anneal(problem.static, problem.work, codes, problem.limits(floor - 1), *arguments)
    assert excess > 0
    assert time_s == np.inf
    assert codes.tolist() == [Code.SWAP] * len(codes)
    assert anneal(problem.static, problem.work, codes, problem.limits(10 * floor), *arguments)[0] == 0
    assert codes[0] == Code.SWAP
    assert Code.KEEP in codes


@pytest.mark.parametrize("decision_class", planners.classes_of("torchdelta"))
@pytest.mark.parametrize("effort", keep(["fast", "best"], ["fast"], 0))
def test_the_same_question_has_the_same_answer(decision_class, effort):
    """Two calls give the same plan, to the last op."""
    planner = planners.get("torchdelta", decision_class)
    budget_bytes = PlanningProblem.of(STEP, MACHINE).plain_peak_bytes * 6 // 10
    plan = planner(STEP, MACHINE, budget_bytes, effort)
    assert plan == planner(STEP, MACHINE, budget_bytes, effort)
    validate(STEP, plan, MACHINE)
    assert (plan.header.planner, plan.header.decision_class) == ("torchdelta", decision_class)


def test_where_each_action_costs_fewer_tensors_leave():
    """Many small tensors are the cheapest to recompute, until the runtime's own work for each of them counts."""
    step = chain([(8 * MIB, 2e-2, 1e-4), *[(MIB, 1e-5, 1e-5)] * 8, (MIB, 2e-3, 1e-4)], weight_bytes=1024)
    slow = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)  # nothing is swapped
    free = PlanningProblem.of(step, slow, min_size_bytes=1)
    dear = PlanningProblem.of(step, msgspec.structs.replace(slow, replay_compute_s=2e-2), min_size_bytes=1)
    budget_bytes = free.plain_peak_bytes - 3 * MIB
    codes = [choose(problem, budget_bytes, "best") for problem in (free, dear)]
    assert all(
        problem.score(found, budget_bytes).is_feasible for problem, found in zip((free, dear), codes, strict=True)
    )
    assert np.count_nonzero(codes[1]) < np.count_nonzero(codes[0])


def test_what_fits_is_left_alone():
    """At the plain peak the plan is empty."""
    assert not planners.get("torchdelta")(STEP, MACHINE, PlanningProblem.of(STEP, MACHINE).plain_peak_bytes).absences


@pytest.mark.parametrize("decision_class", planners.classes_of("torchdelta"))
@pytest.mark.parametrize("optimizer", [False, True])
def test_the_least_budget_that_the_error_names_works(decision_class, optimizer):
    """Below the least peak it is an error whose number can be used at once."""
    planner = planners.get("torchdelta", decision_class)
    trace = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4, optimizer=optimizer)
    with pytest.raises(InfeasibleError) as caught:
        planner(trace, MACHINE, 1000)
    assert caught.value.least_budget_bytes is not None
    plan = planner(trace, MACHINE, caught.value.least_budget_bytes)
    assert plan.absences
    validate(trace, plan, MACHINE)


@pytest.mark.parametrize("decision_class", planners.classes_of("torchdelta"))
@pytest.mark.parametrize("host_bytes", [0, 16 * MIB])
def test_without_room_on_the_host_no_budget_is_named_that_needs_it(decision_class, host_bytes):
    """What swapping everything would take is no answer there: what is named works, or the host is what lacks room."""
    machine = msgspec.structs.replace(MACHINE, host_memory_bytes=host_bytes)
    trace = msgspec.structs.replace(STEP, ops=tuple(msgspec.structs.replace(op, recomputable=False) for op in STEP.ops))
    planner = planners.get("torchdelta", decision_class)
    for budget_bytes in (1000, PlanningProblem.of(STEP, MACHINE).plain_peak_bytes * 6 // 10):
        with pytest.raises(InfeasibleError) as caught:
            planner(trace, machine, budget_bytes)
        least_bytes = caught.value.least_budget_bytes
        if least_bytes is None:
            assert "exceeds the host's budget by" in str(caught.value)
            assert host_bytes
        else:
            validate(trace, planner(trace, machine, least_bytes), machine)


def test_states_on_the_host_need_less_and_cost_less():
    """At the least budget of *saved* the class *all* has room to spare: what takes time there is free here."""
    trace = chain([(16 * MIB, 2e-2, 5e-3)] * 4, weight_bytes=8 * MIB, optimizer=True)
    saved, everything = PlanningProblem.of(trace, MACHINE), PlanningProblem.of(trace, MACHINE, decision_class="all")
    assert least_peak(everything) + 4 * 8 * MIB <= least_peak(saved)
    plans = [planners.get("torchdelta", name)(trace, MACHINE, least_peak(saved)) for name in ("saved", "all")]
    times_s = [simulate_plan(trace, MACHINE, plan).time_s for plan in plans]
    assert times_s[0] > saved.plain_time_s
    assert times_s[1] == pytest.approx(saved.plain_time_s)
    assert any(absence.next_use_op >= len(trace.ops) for absence in plans[1].absences)
    validate(trace, plans[1], MACHINE)


@settings(max_examples=10, deadline=None)
@given(blocks(), st.integers(1, 16), st.floats(0, 1), st.sampled_from(("persistent", "all")))
def test_all_is_never_worse_than_saved(drawn, weight_mib, share, larger):
    """Whatever the budget is, from the least that *saved* has a plan for; nor is the class *persistent*."""
    trace = chain(drawn, weight_bytes=weight_mib * MIB, optimizer=True)
    problem = PlanningProblem.of(trace, MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    times_s = [
        simulate_plan(trace, MACHINE, planners.get("torchdelta", name)(trace, MACHINE, budget_bytes, "fast")).time_s
        for name in ("saved", larger)
    ]
    assert times_s[1] <= times_s[0] * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(blocks(), st.floats(0, 1))
def test_more_freedom_is_never_worse(drawn, share):
    """The class *extended* starts from the answer in *saved*."""
    trace = chain(drawn)
    problem = PlanningProblem.of(trace, MACHINE)
    budget_bytes = _budget_bytes(problem, share)
    extended = PlanningProblem.of(trace, MACHINE, decision_class="extended")
    place = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(extended.gaps)}
    start = extended.keep_all()
    codes = choose(problem, budget_bytes, "fast")
    for gap, code in zip(problem.gaps, codes, strict=True):
        start[place[gap.buffer_id, gap.last_use_op]] = code
    found = extended.score(choose(extended, budget_bytes, "fast", start=start), budget_bytes)
    assert found.time_s <= problem.score(codes, budget_bytes).time_s * (1 + 1e-9)
