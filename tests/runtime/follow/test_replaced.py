"""Steps that replace persistent tensors by new ones, which a plan for these tensors cannot know."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from tests.runtime.follow.test_wanted import ODD, ended
from tests.same_bits.judge import bits_of
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow.wanted import WantedSteps

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

WIDTH, NUM_STEPS, WAIT_S = 256, 30, 120.0


def _train(scope: contextlib.AbstractContextManager[Any], num_steps: int = NUM_STEPS) -> tuple[Any, int]:
    """Train with an update that makes new parameters. Return the bits of these, and how many plans were made."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    num_plans = 0
    with scope:
        for _ in range(num_steps):
            model(torch.randn(WIDTH, WIDTH)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data = parameter.data - 1e-3 * parameter.grad
                parameter.grad = None
            if (session := cast("Session | None", current_session())) is not None:
                session.programs.wait(WAIT_S)
                num_plans = session.programs.num_programs
    return bits_of(list(model.parameters())), num_plans


def test_a_training_that_makes_new_parameters_in_each_step_is_not_planned_for_ever() -> None:
    """Each plan would serve one step, and the helper would never end."""
    plain, _ = _train(contextlib.nullcontext())
    unlimited = MemoryBudget("1TiB", Config(planner=None))
    _train(unlimited, 2)
    budget_bytes = int(0.45 * unlimited.summary().peak_bytes)
    config = Config(decision_class="all", planner="torchdelta", tier="memory")
    found, num_plans = _train(MemoryBudget(budget_bytes, config))
    assert found == plain
    assert 1 <= num_plans <= 4


def test_a_step_that_followed_a_plan_for_long_may_replace_its_tensors_again() -> None:
    """As when a checkpoint is loaded now and then."""
    wanted, program = WantedSteps(), cast("Any", object())
    followed = dataclasses.replace(ended(ODD), program=program)
    replaced = dataclasses.replace(followed, has_replaced=True)
    for step in [replaced, followed] * 5:
        wanted.on_step_end(step, lambda _key, _start: True, is_fruitless=False)
    assert not wanted.is_unplannable(ODD, 0)
    for _ in range(2):
        wanted.on_step_end(replaced, lambda _key, _start: True, is_fruitless=False)
    assert wanted.is_unplannable(ODD, 0)
