"""Small buffers leave where the budget asks for it, and only there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import InfeasibleError
from torchdelta.plan.validate import validate
from torchdelta.planners import get
from torchdelta.planners.problem_within import FINEST_BYTES, least_peak, problem_within
from torchdelta.simulate.gaps import MIN_SIZE_BYTES
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Buffer

KIB = 1024
SMALL = chain([(48 * KIB, 2e-3, 1e-4)] * 12, weight_bytes=KIB)
PLAIN_BYTES = PlanningProblem.of(SMALL, MACHINE).plain_peak_bytes


@pytest.mark.parametrize(
    ("planner", "decision_class"),
    [
        ("torchdelta", "saved"),
        ("torchdelta", "extended"),
        ("torchdelta", "all"),
        ("delta-2024", "saved"),
        ("swap-all", "saved"),
    ],
)
def test_a_step_of_small_tensors_has_a_plan(planner: str, decision_class: str) -> None:
    """No tensor of it has the size from which on buffers leave elsewhere."""
    budget_bytes = PLAIN_BYTES * 6 // 10
    coarse = PlanningProblem.of(SMALL, MACHINE)
    assert len(coarse.gaps) == 0
    assert least_peak(coarse) == PLAIN_BYTES > budget_bytes
    plan = get(planner, decision_class)(SMALL, MACHINE, budget_bytes)
    validate(SMALL, plan, MACHINE)
    assert plan.absences


def test_where_larger_buffers_are_enough_small_ones_stay() -> None:
    """Every gap costs planning time."""
    trace = chain([(MIB, 2e-3, 1e-4), (48 * KIB, 2e-3, 1e-4)] * 6, weight_bytes=KIB)
    plain_bytes = PlanningProblem.of(trace, MACHINE).plain_peak_bytes
    problem = problem_within(trace, MACHINE, plain_bytes * 7 // 10)
    assert problem.min_size_bytes == MIN_SIZE_BYTES
    assert 0 < len(problem.gaps) < len(PlanningProblem.of(trace, MACHINE, min_size_bytes=1).gaps)


@pytest.mark.parametrize(("budget_bytes", "finest_bytes"), [(1, FINEST_BYTES), (128 * MIB, 64 * KIB), (2**40, 2**18)])
def test_no_buffer_leaves_that_is_tiny_beside_the_budget(budget_bytes: int, finest_bytes: int) -> None:
    """The number of gaps is bounded, however many small tensors a step saves."""
    blocks = [(max(4 * budget_bytes, MIB), 2e-3, 1e-4), *[(48 * KIB, 2e-3, 1e-4)] * 4]  # nothing holds such a budget
    problem = problem_within(chain(blocks), MACHINE, budget_bytes)
    assert least_peak(problem) > budget_bytes
    assert problem.min_size_bytes == finest_bytes


def test_an_impossible_budget_names_what_small_buffers_make_possible() -> None:
    """The least budget in the error is one at which there is a plan."""
    with pytest.raises(InfeasibleError) as raised:
        get("torchdelta", "saved")(SMALL, MACHINE, 64 * KIB)
    least_bytes = raised.value.least_budget_bytes
    assert least_bytes is not None
    assert least_bytes < PLAIN_BYTES
    validate(SMALL, get("torchdelta", "saved")(SMALL, MACHINE, least_bytes), MACHINE)


@pytest.mark.parametrize("decision_class", ["saved", "extended", "all"])
def test_the_named_budget_holds_although_it_leaves_small_buffers_no_choice(decision_class: str) -> None:
    """Beside a large constant the small buffers, which leave within the budget that was refused, stay in the named."""
    trace = chain([(20 * KIB, 2e-3, 1e-4)] * 20, weight_bytes=KIB)
    num = len(trace.buffers)
    large = Buffer(id=num, storage_id=num, size_bytes=100 * MIB, kind="constant", birth_op=-1, death_op=len(trace.ops))
    trace = replace(trace, buffers=(*trace.buffers, large))
    with pytest.raises(InfeasibleError) as raised:
        get("torchdelta", decision_class)(trace, MACHINE, MIB)
    least_bytes = raised.value.least_budget_bytes
    assert least_bytes is not None
    planner = get("torchdelta", decision_class)
    validate(trace, planner(trace, MACHINE, least_bytes), MACHINE)
