"""What holds of every registered planner, on steps made by hand, on random ones and on real ones."""

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bounds.exhaustive import best_of_all
from tests.planners import steps
from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.sampling import keep, sample
from tests.trace.strategies import traces
from torchdelta.bounds.lp_bound import bound
from torchdelta.errors import InfeasibleError
from torchdelta.plan.validate import validate
from torchdelta.planners import classes_of, get, names
from torchdelta.planners.default.search_planner import choose
from torchdelta.planners.literature import played
from torchdelta.planners.problem_within import least_peak
from torchdelta.simulate import execute, simulate_plan
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import peak

FAST = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e12, host_in_bytes_per_s=1e12)
SLOW = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
PLANNERS = [f"{name}/{decision_class}" for name in names() for decision_class in classes_of(name)]
# What a solver leaves open, and sums in another order.
RELATIVE = 1e-6


SEEN = []  # the scores that became plans, the last one last


@pytest.fixture(autouse=True, scope="module")
def _noted():
    """Note what planners see before they return a plan."""
    plain, accepted = PlanningProblem.simulation, played.accepted

    def noting(self, codes, budget_bytes, **names):
        SEEN.append(self.score(codes, budget_bytes))
        return plain(self, codes, budget_bytes, **names)

    def noting_played(simulation, *arguments):
        SEEN.append(simulation.score)
        return accepted(simulation, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanningProblem, "simulation", noting)
        patch.setattr(played, "accepted", noting_played)
        yield


def planner_named(name):
    """Return the planner of a name and a class, such as "torchdelta/extended"."""
    planner, _, decision_class = name.partition("/")
    return get(planner, decision_class)


def plan_or_none(name, trace, machine, budget_bytes, effort="fast"):
    """Return a planner's plan after the independent validator has accepted it; None where it says that none fits."""
    try:
        plan = planner_named(name)(trace, machine, budget_bytes, effort)
    except InfeasibleError as error:
        refusal = error
        plan = None
    if plan is None:
        assert refusal.least_budget_bytes is None or refusal.least_budget_bytes > budget_bytes
        assert " 0 B" not in str(refusal)
        return None
    validate(trace, plan, machine)
    assert f"{plan.header.planner}/{plan.header.decision_class}" == name
    assert plan.header.budget_bytes == budget_bytes
    # Its planner saw what the plan costs when it is executed as written.
    seen, found = SEEN[-1], execute(trace, machine, plan)
    assert seen.is_feasible
    assert found.time_s == pytest.approx(seen.time_s, rel=1e-12)
    assert found.peak.size_bytes == seen.peak_bytes <= budget_bytes
    assert found.stall_s == pytest.approx(seen.stall_s, rel=1e-9, abs=1e-9 * found.time_s)
    return plan


def between(problem, share):
    """Return a budget between the least peak that is known and the plain one."""
    floor = least_peak(problem)
    return int(floor + share * (problem.plain_peak_bytes - floor))


@pytest.mark.parametrize("name", keep(PLANNERS, PLANNERS[::3]))
@settings(max_examples=10)
@given(
    drawn=blocks(),
    optimizer=st.booleans(),
    percent=st.integers(30, 100),
    machine=st.sampled_from([MACHINE, FAST, SLOW]),
)
def test_plans_of_networks_made_by_hand(name, drawn, optimizer, percent, machine):
    """Valid, within the budget, and the same every time; also with an optimizer whose states outlive the step."""
    trace = chain(drawn, optimizer=optimizer)
    budget_bytes = peak(trace, with_workspace=True).size_bytes * percent // 100
    plan = plan_or_none(name, trace, machine, budget_bytes)
    assert plan_or_none(name, trace, machine, budget_bytes) == plan


@pytest.mark.parametrize("name", keep(PLANNERS, PLANNERS[1::3]))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trace=st.booleans().flatmap(lambda lasting: traces(lasting=lasting)), percent=st.integers(30, 100))
def test_plans_of_random_steps(name, trace, percent):
    """Whatever may stand in a trace: writes in place, phases in any order, ops that cannot run again, huge sizes."""
    # A budget of nothing is no question: its error names 0 B.
    plan_or_none(name, trace, MACHINE, max(1, peak(trace, with_workspace=True).size_bytes * percent // 100))


@pytest.mark.parametrize("name", PLANNERS)
def test_a_step_far_above_the_budget_is_refused(name):
    """Also where its excess, added up over the ops, is more than 64 bits hold."""
    assert plan_or_none(name, chain([(2**55, 2e-3, 1e-4)] * 10), MACHINE, 2**40) is None


# The models in turn, so that the sample has them all.
@pytest.mark.parametrize(("name", "model"), sample(itertools.product(PLANNERS, steps.STEPS), 4))
def test_plans_of_real_steps(model, name):
    """A transformer, a ResNet and a U-Net, from little to all that can leave."""
    trace = steps.real_step(model)
    problem = PlanningProblem.of(trace, steps.MACHINE)
    for share in (0.8, 0.4, 0.1, 0.0):
        plan_or_none(name, trace, steps.MACHINE, between(problem, share))
    roomy = plan_or_none(name, trace, steps.MACHINE, problem.plain_peak_bytes)
    assert roomy is not None, "what fits without a plan needs none"


@pytest.mark.parametrize("model", sample(steps.STEPS, 0, 1))
def test_no_plan_of_a_real_step_beats_the_bound(model):
    """The linear program's time is below every plan of its class, the best effort's too where that is quick."""
    trace = steps.real_step(model)
    problem = PlanningProblem.of(trace, steps.MACHINE)
    for share in (0.6, 0.3):
        budget_bytes = between(problem, share)
        proved = bound(trace, steps.MACHINE, budget_bytes)
        ours = [("torchdelta/saved", "best")] if model != "unet" else []
        for name, effort in [*((name, "fast") for name in PLANNERS), *ours]:
            plan = plan_or_none(name, trace, steps.MACHINE, budget_bytes, effort)
            if plan is not None and plan.header.decision_class == proved.decision_class:
                assert simulate_plan(trace, steps.MACHINE, plan).time_s >= proved.time_s * (1 - RELATIVE), name


@pytest.mark.parametrize(
    ("model", "effort"),
    keep(
        [("gpt2", "fast"), ("gpt2", "best"), ("resnet", "fast"), ("resnet", "best"), ("unet", "fast")],
        [("gpt2", "fast"), ("resnet", "fast"), ("unet", "fast")],
        0,
    ),
)
def test_a_smaller_budget_never_takes_less_time(model, effort):
    """By more than 0.2 points of the plain step."""
    problem = PlanningProblem.of(steps.real_step(model), steps.MACHINE)
    before_s = problem.plain_time_s
    for share in (0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0):
        budget_bytes = between(problem, share)
        score = problem.score(choose(problem, budget_bytes, effort), budget_bytes)
        assert score.is_feasible
        assert score.time_s >= before_s - 0.002 * problem.plain_time_s, share
        before_s = max(before_s, score.time_s)


def check_small(trace, budget_bytes):
    """The best of all combinations is no slower than what any planner of the class `saved` finds."""
    tolerance_s = RELATIVE * sum(op.time_s for op in trace.ops)
    best_s, found = best_of_all(trace, MACHINE, budget_bytes)
    for name in PLANNERS:
        plan = plan_or_none(name, trace, MACHINE, budget_bytes)
        if plan is not None and plan.header.decision_class == "saved":
            assert simulate_plan(trace, MACHINE, plan).time_s >= best_s - tolerance_s, name
    if found is not None:
        ours = plan_or_none("torchdelta/saved", trace, MACHINE, budget_bytes, "best")
        assert ours is not None
        assert simulate_plan(trace, MACHINE, ours).time_s <= best_s * 1.02 + 1e-9


@settings(max_examples=15)
@given(drawn=blocks().filter(lambda drawn: len(drawn) <= 3), percent=st.integers(30, 100))
def test_nobody_beats_exhaustive_search(drawn, percent):
    """And the default's best effort is within 2 % of it, and fits wherever anything does."""
    trace = chain(drawn)
    check_small(trace, peak(trace, with_workspace=True).size_bytes * percent // 100)


@pytest.mark.parametrize("share", keep([0.8, 0.5, 0.2], [0.5]))
def test_exhaustive_search_of_many_candidates(share):
    """Blocks of different shape, so that who leaves and how matters."""
    drawn = [(8 * MIB, 2e-3, 1e-4), (3 * MIB, 8e-3, 5e-4), (12 * MIB, 5e-4, 2e-3), (5 * MIB, 2e-3, 8e-3)]
    trace = chain([*drawn, (8 * MIB, 1e-4, 5e-4)])
    check_small(trace, between(PlanningProblem.of(trace, MACHINE), share))
