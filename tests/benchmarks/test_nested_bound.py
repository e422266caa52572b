"""The bound by nesting: never above the best of all plans, nor moved by how states are left out on the way."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.papers.proof import bound as module
from benchmarks.papers.proof import step
from benchmarks.papers.proof.bound import nested_bound
from benchmarks.papers.proof.inner import SLOPES, InnerProgram, look_ops, outside_of
from benchmarks.papers.proof.moves import advance
from benchmarks.papers.proof.parametric_program import ParametricProgram
from benchmarks.papers.proof.states import HELD_S, KEPT_BYTES, LOST_S, begin, finish, look_ahead
from tests.bounds.exhaustive import best_of_all
from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.planners.tangles import tangles
from tests.sampling import sample
from torchdelta.bounds.lp_bound import bound
from torchdelta.errors import PlanError
from torchdelta.planners.problem_within import least_peak
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import peak

NEVER, ALWAYS = 10**9, 1
RATES = st.sampled_from([3e8, 1e9, 4e9, 1e10])
WAYS = {"by dominance alone": (NEVER, NEVER), "by linear programs": (ALWAYS, NEVER), "by cases": (ALWAYS, ALWAYS)}


def machine(out_bytes_per_s, in_bytes_per_s):
    """Return the test machine with links of these rates."""
    return msgspec.structs.replace(MACHINE, host_out_bytes_per_s=out_bytes_per_s, host_in_bytes_per_s=in_bytes_per_s)


def budget(trace, percent):
    """Return a budget between the least peak of the class (0) and the plain one (100)."""
    least_bytes = least_peak(PlanningProblem.of(trace, MACHINE))
    most_bytes = peak(trace, with_workspace=True).size_bytes
    return least_bytes + (most_bytes - least_bytes) * percent // 100


def best_s(trace, machine, budget_bytes):
    """Return the time of the best of all plans by the simulator, infinite if none fits."""
    return best_of_all(trace, machine, budget_bytes)[0]


@pytest.mark.parametrize("way", sample(WAYS, 0, 0))
@settings(max_examples=25, deadline=None)
@given(
    drawn=blocks().filter(lambda drawn: len(drawn) <= 3),
    percent=st.integers(0, 100),
    rates=st.tuples(RATES, RATES),
    kind=st.sampled_from([{}, {"skips": True}, {"stats": True}]),
    ceiling=st.sampled_from([0.97, 1.05, 1e9]),
    least_bytes=st.sampled_from([1, 4 * MIB]),
)
def test_no_plan_beats_it(way, drawn, percent, rates, kind, ceiling, least_bytes):
    """The best of all plans is no faster, however states are left out and whatever is decided at all."""
    trace = chain(drawn, **kind)
    links, budget_bytes = machine(*rates), budget(trace, percent)
    best = best_s(trace, links, budget_bytes)
    ceiling_s = min(ceiling * best, 1e9)
    many, branch = WAYS[way]
    found = nested_bound(
        trace, links, budget_bytes, ceiling_s, min_candidate_bytes=least_bytes, many=many, branch=branch
    )
    assert found <= min(best, ceiling_s) * (1 + 1e-9)
    assert found >= min(sum(op.time_s for op in trace.ops), ceiling_s) * (1 - 1e-9)


@pytest.mark.whole
@settings(max_examples=60, deadline=None)
@given(trace=tangles(), percent=st.integers(0, 40), rates=st.tuples(RATES, RATES), way=st.sampled_from(list(WAYS)))
def test_no_plan_of_a_tangled_step_beats_it(trace, percent, rates, way):
    """Several outputs of an op, parents that are needed before their children, several tensors for one op."""
    links, budget_bytes = machine(*rates), budget(trace, percent)
    best = best_s(trace, links, budget_bytes)
    ceiling_s = 1.05 * best if best < float("inf") else 1.0
    many, branch = WAYS[way]
    found = nested_bound(trace, links, budget_bytes, ceiling_s, min_candidate_bytes=1, many=many, branch=branch)
    assert found <= best * (1 + 1e-9)


@pytest.mark.rest
@settings(max_examples=25, deadline=None)
@given(
    drawn=blocks().filter(lambda drawn: len(drawn) >= 3),
    percent=st.integers(0, 60),
    rates=st.tuples(RATES, RATES),
    skips=st.booleans(),
)
@example(  # the best plan takes 14.002 ms, which the programs prove; dominance alone proves 13.802
    drawn=[
        (10 * MIB, 1e-4, 1e-4),
        (10 * MIB, 5e-4, 2e-3),
        (10 * MIB, 1e-4, 1e-4),
        (10 * MIB, 5e-4, 1e-4),
        (15 * MIB, 1e-4, 1e-4),
    ],
    percent=53,
    rates=(3e8, 3e8),
    skips=False,
)
def test_linear_programs_leave_out_nothing_that_ends_below_the_ceiling(drawn, percent, rates, skips):
    """Just below what dominance alone finds the ceiling is reached; just above, only if no plan is faster."""
    trace = chain(drawn, skips=skips)
    links, budget_bytes = machine(*rates), budget(trace, percent)
    plain_s = sum(op.time_s for op in trace.ops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLACK", 0.0)
        alone = nested_bound(trace, links, budget_bytes, 1e9, min_candidate_bytes=1, many=NEVER)
        above = alone + 1e-4 * (alone - plain_s) + 1e-9
        below = alone - 1e-4 * (alone - plain_s) - 1e-9
        for branch in (NEVER, ALWAYS):
            ends = [
                nested_bound(trace, links, budget_bytes, ceiling_s, min_candidate_bytes=1, many=ALWAYS, branch=branch)
                for ceiling_s in (above, below)
            ]
            assert ends[1] == pytest.approx(below, rel=1e-8)
            assert ends[0] >= alone * (1 - 1e-8)
            if ends[0] > alone * (1 + 1e-8):  # the programs may prove more than dominance: then it has to be so
                assert ends[0] <= best_s(trace, links, budget_bytes) * (1 + 1e-9)


def ends_s(nest, middle, states, position):
    """Return the least loss with which states end, whatever is decided from a position on."""
    for undecided in range(position, len(nest.last_op)):
        states = advance(nest, states, undecided, float("inf"), 0.0)
        if not len(states[0]):
            return float("inf")
    return finish(nest, states, middle).min()


@settings(max_examples=25, deadline=None)
@given(
    drawn=blocks().filter(lambda drawn: 2 <= len(drawn) <= 3),
    percent=st.integers(0, 60),
    rates=st.tuples(RATES, RATES),
    kind=st.sampled_from([{}, {"skips": True}, {"stats": True}]),
)
def test_what_the_inner_part_loses_at_least_is_no_more_than_what_it_loses(drawn, percent, rates, kind):
    """At every edge, from every state, by a cut made for this state and by one made for another."""
    trace = chain(drawn, **kind)
    nest, middle, rates, _ = step.nest_step(trace, machine(*rates), budget(trace, percent), 1)
    states = begin()
    for position in range(1, len(nest.last_op)):
        states = advance(nest, states, position - 1, float("inf"), 0.0)
        if nest.next_op[position] == nest.next_op[position - 1]:
            continue  # their copies back may still change places
        out_ops, in_ops = look_ops(nest, position, middle)
        outside = outside_of(nest, states[0], position)
        ahead = look_ahead(nest, states, position, np.array(rates), SLOPES, out_ops, in_ops)
        points = np.column_stack([states[1][:, KEPT_BYTES], ahead, outside.flags(states[0])])
        lost_s = states[1][:, LOST_S] + states[1][:, HELD_S]
        rows = [row for row in range(0, len(points), 1 + len(points) // 8) if np.isfinite(points[row]).all()]
        inner = InnerProgram(nest, position, middle, rates, outside, 10.0)
        cuts = [inner.cut(points[row]) for row in rows]
        for row in rows:
            least_s = lost_s[row] + max(cut.at(points[row : row + 1])[0] for cut in cuts)
            one = tuple(part[row : row + 1].copy() for part in states)
            assert least_s <= ends_s(nest, middle, one, position) + 1e-9


def test_whole_tensors_cost_more_than_shares_of_them():
    """Room for one and a half of equal tensors keeps one; the linear program keeps the half, too."""
    trace = chain([(8 * MIB, 8e-3, 8e-3)] * 4)
    links, budget_bytes = machine(3e8, 3e8), budget(trace, 10)
    plain_s = sum(op.time_s for op in trace.ops)
    divided = bound(trace, links, budget_bytes, num_moments=len(trace.ops), min_candidate_bytes=1).time_s - plain_s
    whole = nested_bound(trace, links, budget_bytes, 1e9, min_candidate_bytes=1) - plain_s
    best = best_s(trace, links, budget_bytes) - plain_s
    assert divided < 0.9 * whole
    assert whole <= best


def test_a_step_with_too_many_candidates_proves_the_plain_time(monkeypatch):
    """A state has room for so many bits: with more nothing is decided, and the plain time is all that is said."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 3)
    plain_s = sum(op.time_s for op in trace.ops)
    monkeypatch.setattr(step, "MAX_CANDIDATES", 2)
    assert nested_bound(trace, MACHINE, 10 * MIB, 1e9, min_candidate_bytes=1) == pytest.approx(plain_s)


def test_where_nothing_fits_the_ceiling_is_proved():
    """However much time they are given, no plan holds a budget below the least peak."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 3)
    assert nested_bound(trace, MACHINE, 10 * MIB, 123.0, min_candidate_bytes=1) == pytest.approx(123.0)


def test_it_gives_up_with_what_is_proved_by_then():
    """With room for no more than a state, what is proved is less, and still right."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 4)
    budget_bytes = budget(trace, 20)
    whole = nested_bound(trace, MACHINE, budget_bytes, 1e9, min_candidate_bytes=1)
    ended = nested_bound(trace, MACHINE, budget_bytes, 1e9, min_candidate_bytes=1, max_states=1)
    assert sum(op.time_s for op in trace.ops) * (1 - 1e-6) <= ended < whole


def test_small_tensors_whose_replay_brings_others_back_are_decided():
    """Four bytes made from a wide output are read before it: who replays them has it back early."""
    plain = step.nest_step(chain([(8 * MIB, 2e-3, 2e-4)] * 3), MACHINE, 20 * MIB, MIB)
    with_stats = step.nest_step(chain([(8 * MIB, 2e-3, 2e-4)] * 3, stats=True), MACHINE, 20 * MIB, MIB)
    assert plain is not None
    assert with_stats is not None
    assert (plain.nest.size_bytes >= MIB).all()
    assert sorted(with_stats.nest.size_bytes)[:3] == [4.0, 4.0, 4.0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_cut_lies_below_the_least_cost_everywhere(data):
    """It touches it where it was asked for, and nowhere lies above what another cut says of its own point."""
    number = st.integers(-5, 5).map(float)
    program = ParametricProgram(2)
    variables = [program.variable(10.0, cost=data.draw(st.integers(0, 5))) for _ in range(4)]
    beyond = program.variable(1000.0, cost=100.0)
    for _ in range(data.draw(st.integers(1, 5))):
        terms = [(variable, data.draw(number)) for variable in variables]
        row = program.row([*terms, (beyond, 1.0)], lower=data.draw(number))
        for parameter in range(2):
            program.move(row, parameter, data.draw(number))
    points = np.array(data.draw(st.lists(st.tuples(number, number), min_size=3, max_size=3)))
    cuts = [program.cut(point) for point in points]
    touched = [cut.at(point[None])[0] for cut, point in zip(cuts, points, strict=True)]
    assert min(touched) >= -1e-6  # no cost is negative
    for cut in cuts:
        assert (cut.at(points) <= np.array(touched) + 1e-6).all()


def test_a_cut_is_the_least_cost_at_its_own_point():
    """Known by hand: as much as is asked for, of the cheap kind first, then of the dear one."""
    program = ParametricProgram(1)
    cheap, dear = program.variable(3.0, cost=1.0), program.variable(10.0, cost=4.0)
    program.move(program.row([(cheap, 1.0), (dear, 1.0)], lower=0.0), 0, 1.0)
    points = np.array([[0.0], [2.0], [5.0]])
    assert [float(program.cut(point).at(point[None])[0]) for point in points] == pytest.approx([0.0, 2.0, 11.0])
    program.hold(cheap, 0.0, 0.0)
    assert float(program.cut(points[1]).at(points[1:2])[0]) == pytest.approx(8.0)
    program.hold(cheap, 0.0, 3.0)
    assert float(program.cut(points[1]).at(points[1:2])[0]) == pytest.approx(2.0)


def test_rows_with_two_sides_and_variables_without_end_are_refused():
    """Their prices say nothing that holds everywhere."""
    sides = ParametricProgram(1)
    sides.row([(sides.variable(1.0), 1.0)], lower=0.0, upper=1.0)
    endless = ParametricProgram(1)
    endless.row([(endless.variable(float("inf")), 1.0)], lower=0.0)
    for program in (sides, endless):
        with pytest.raises(PlanError, match="one side"):
            program.cut(np.zeros(1))
