"""A program that brings back more, and earlier, than there is room for costs time, and neither an error nor a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.following import planned_here
from tests.runtime.follow.all_away import all_away
from tests.runtime.programs import UNLIMITED, running
from torchdelta.runtime.memory.replay import Replayer

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import Plan
    from torchdelta.trace.model import Trace

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, NUM_ROWS, DEPTH = 64, 256, 10
NUM_STEPS = 5


def _train(budget: int | str, **options: str) -> tuple[list[torch.Tensor], int, int]:
    """Return the parameters, the highest peak after the first step, and how many steps were followed."""
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with running(budget, **options) as (memory_budget, session):
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model(torch.randn(NUM_ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
    peak_bytes = max(step.peak_bytes for step in memory_budget.summary().steps[1:])
    return [parameter.detach() for parameter in model.parameters()], peak_bytes, session.follower.num_followed_steps


@pytest.mark.parametrize("action", ["recompute", "swap"])
def test_what_there_is_no_room_for_yet_comes_when_it_is_used(action: str) -> None:
    """The budget of a step that reacts is enough, whatever the program asks for."""
    expected, plain_bytes, _ = _train(UNLIMITED)
    budget = plain_bytes * 6 // 10
    reacting, peak_bytes, _ = _train(budget, policy="recompute-only")
    assert peak_bytes <= budget

    def choose(trace: Trace, _machine: Machine, _budget_bytes: int) -> Plan:
        return all_away(trace, action)

    with planned_here(choose):
        found, peak_bytes, num_followed = _train(budget, policy="recompute-only", planner="torchdelta")
    assert num_followed >= 2
    assert peak_bytes <= budget
    for parameters in (reacting, found):
        assert all(torch.equal(a, b) for a, b in zip(expected, parameters, strict=True))


def test_a_replay_that_fails_ahead_of_its_use_is_made_again_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error belongs to the tensor that cannot be brought back, when it is unpacked; others may never be."""
    from torchdelta.errors import ReplayError

    expected, plain_bytes, _ = _train(UNLIMITED)
    failed: list[int] = []

    def fail(_replayer: Replayer, targets: list[object]) -> None:
        failed.append(len(targets))
        raise ReplayError("injected")

    monkeypatch.setattr(Replayer, "recompute_group", fail)
    with planned_here(lambda trace, _machine, _budget_bytes: all_away(trace, "recompute")):
        found, _, num_followed = _train(plain_bytes * 8 // 10, policy="recompute-only", planner="torchdelta")
    assert failed
    assert num_followed >= 2
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
