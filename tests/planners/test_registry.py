"""Planners are found by name, and what cannot be planned is one clear line."""

import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta import planners
from torchdelta.errors import InfeasibleError, PlanError

TRACE = chain([(8 * MIB, 2e-3, 1e-4)] * 2)


def test_an_unknown_planner_is_named_with_its_nearest():
    """A misspelling gets its correction."""
    with pytest.raises(PlanError, match=r"unknown planner 'kep'; the nearest is 'keep'"):
        planners.get("kep")


def test_keep_keeps_everything_where_it_fits():
    """Its plan is empty."""
    plan = planners.get("keep")(TRACE, MACHINE, 2**40)
    assert plan.absences == plan.replays == ()
    assert plan.header.planner == "keep"


def test_what_does_not_fit_names_the_least_budget():
    """The error carries the number, and it is one that works."""
    with pytest.raises(InfeasibleError, match="least budget found") as caught:
        planners.get("keep")(TRACE, MACHINE, 1000)
    assert caught.value.least_budget_bytes is not None
    planners.get("keep")(TRACE, MACHINE, caught.value.least_budget_bytes)
