"""What a planner is asked: with gradients that depart, and with the room on the tier that they leave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from tests.planners.chains import MACHINE, MIB, chain
from tests.runtime.follow.test_schedule import _log
from torchdelta.plan.request import Answer
from torchdelta.runtime.follow.asked import Asked

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine

STEP = chain([(8 * MIB, 8e-3, 1e-4)] * 4, weight_bytes=4 * MIB, optimizer=True)
KEYS = {each.id: each.storage_id for each in STEP.buffers if each.kind not in {"activation", "temporary"}}
ASKED = Asked(
    key=(0, 0),
    start_bytes=0,
    step=(STEP, _log(persistents=KEYS, num_ops=len(STEP.ops))),
    margin_bytes=0,
    num_plans=1,
    unseen_bytes=0,
)
BUDGET_BYTES = 16 * MIB  # of weights, gradients and momenta, 48 MiB
GRADIENT_BYTES = 12 * MIB  # of those that can depart: the last one is made too late


def departing_bytes(asked: Asked) -> int:
    """Return how much departs in the step that the planner gets."""
    return sum(each.size_bytes for each in asked.planned_step[1].departures)


def machine_of(capacity_bytes: int | None) -> Machine:
    """Return a machine whose tier takes so much."""
    return structs.replace(MACHINE, host_memory_bytes=capacity_bytes)


def test_the_planner_gets_the_step_in_which_gradients_depart() -> None:
    """The request keeps the step as it was traced, for the next plan."""
    asked = ASKED.planned_for(machine_of(None), BUDGET_BYTES)
    assert departing_bytes(asked) == GRADIENT_BYTES
    assert asked.step == ASKED.step
    assert asked.planned_step[0] != STEP
    assert ASKED.planned_for(machine_of(None), 100 * MIB).planned_step == ASKED.step


def test_room_on_the_tier_is_left_to_departing_gradients() -> None:
    """The plan may use the rest; where it would be less than half, no gradient departs."""
    asked = ASKED.planned_for(machine_of(2 * GRADIENT_BYTES), BUDGET_BYTES)
    assert asked.machine == machine_of(GRADIENT_BYTES)
    assert departing_bytes(asked) == GRADIENT_BYTES
    small = machine_of(2 * GRADIENT_BYTES - 2)
    asked = ASKED.planned_for(small, BUDGET_BYTES)
    assert asked.machine == small
    assert departing_bytes(asked) == 0


def test_a_step_without_a_plan_is_asked_for_once_more_without_departing_gradients() -> None:
    """Only if some departed."""
    asked = ASKED.planned_for(machine_of(None), BUDGET_BYTES)
    other = asked.without_departing_gradients()
    assert other is not None
    other = other.planned_for(machine_of(None), BUDGET_BYTES)
    assert other.planned_step == ASKED.step
    assert other.without_departing_gradients() is None


def test_copies_of_departing_gradients_count_in_the_predicted_time() -> None:
    """No plan counts them. A plan without a prediction gets none."""
    machine = structs.replace(MACHINE, out_compute_s_per_byte=1e-9, copy_compute_s=1e-3)
    asked = ASKED.planned_for(machine, BUDGET_BYTES)
    num_departing = len(asked.planned_step[1].departures)
    answer = asked.complete(Answer(time_s=2.0, plain_time_s=1.0))
    assert answer.time_s == pytest.approx(2.0 + GRADIENT_BYTES * 1e-9 + num_departing * 1e-3)
    assert answer.plain_time_s == 1.0
    assert asked.complete(Answer()) == Answer()
    assert replace(asked, departing_step=None).complete(answer) == answer
