"""Planners are found by name, and what cannot be planned is one clear line."""

import inspect

import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta import planners
from torchdelta.cli.fit import fit
from torchdelta.cli.plan import plan
from torchdelta.errors import InfeasibleError, PlanError

TRACE = chain([(8 * MIB, 2e-3, 1e-4)] * 2)


def test_an_unknown_planner_is_named_with_its_nearest():
    """A misspelling gets its correction."""
    with pytest.raises(PlanError, match=r"unknown planner 'kep': did you mean keep\? Known are autoswap-aoa, "):
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


def test_a_planner_names_its_classes():
    """The first is its own; another one that it does not have is an error that lists those that it has."""
    assert planners.classes_of("torchdelta") == ("saved", "extended", "persistent", "all")
    assert planners.classes_of("dtr") == ("extended",)
    assert planners.get("torchdelta") is planners.get("torchdelta", "saved") is not planners.get("torchdelta", "all")
    with pytest.raises(PlanError, match="'dtr' does not plan in the class 'saved': use 'extended'"):
        planners.get("dtr", "saved")


@pytest.mark.parametrize("decision_class", ["extended", "all"])
def test_a_former_name_is_told_its_option(decision_class):
    """What was a planner of its own is a class of the default planner."""
    with pytest.raises(PlanError, match=f"with --class {decision_class} "):
        planners.get(f"torchdelta-{decision_class}")


def test_defaults_are_the_same_everywhere():
    """Of the commands, of the call from Python and of every planner."""
    efforts = {inspect.signature(function).parameters["effort"].default for function in (plan, planners.plan_step)}
    for name in planners.names():
        for decision_class in planners.classes_of(name):
            found = planners.get(name, decision_class)
            efforts.add(inspect.signature(found).parameters["effort"].default)
    assert efforts == {planners.DEFAULT_EFFORT}
    for function in (plan, fit, planners.plan_step):
        assert inspect.signature(function).parameters["planner"].default == planners.DEFAULT_PLANNER
