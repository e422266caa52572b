"""Which followed steps are timed, and what happens if a replay ahead of its use fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, running
from torchdelta.errors import TierIOError
from torchdelta.runtime.follow import predictions
from torchdelta.runtime.follow.planning import Planning
from torchdelta.runtime.memory.replay import Replayer

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

NUM_STEPS, NUM_ROWS, WIDTH, WAIT_S = 12, 256, 128, 120.0


def _train(budget: int, planner: str | None) -> tuple[list[torch.Tensor], int, Session]:
    """Train; the program is there from the third step on. Return the parameters, the peak, and the session."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(budget, planner=planner, tier="memory") as (memory_budget, session):
        for step in range(NUM_STEPS):
            model(torch.randn(NUM_ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if planner is not None and step == 1:
                assert session.programs.wait(WAIT_S)
    return [parameter.detach().clone() for parameter in model.parameters()], memory_budget.summary().peak_bytes, session


@pytest.mark.parametrize("is_planning", [False, True])
def test_steps_beside_which_the_helper_plans_are_not_timed(is_planning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a core: they would seem to take longer than predicted, and longer than reactive steps."""
    poll, answers = Planning.poll, list[Any]()

    def first_only(planning: Planning, timeout_s: float = 0.0) -> Any:
        if answers and is_planning:
            return None
        answer = poll(planning, timeout_s)
        answers.extend([] if answer is None else [answer])
        return answer

    budget = int(0.6 * _train(UNLIMITED, None)[1])
    monkeypatch.setattr(Planning, "poll", first_only)
    with mock.patch.object(predictions, "_MAX_CORRECTIONS", 0):
        session = _train(budget, "torchdelta")[2]
    program = session.programs.latest
    assert program is not None
    assert program.num_followed == NUM_STEPS - 2
    assert program.num_disturbed == (program.num_followed if is_planning else 0)
    assert bool(program.step_times_s or program.first_s) != is_planning


def test_a_replay_ahead_of_its_use_that_cannot_read_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes is made again when it is needed: the disk may work then."""
    expected, peak_bytes, _ = _train(UNLIMITED, None)
    recompute_group, failures = Replayer.recompute_group, list[int]()

    def failing(replayer: Replayer, buffers: list[Any]) -> None:
        if replayer.room.is_optional:
            failures.append(len(buffers))
            raise TierIOError("the disk is busy")
        recompute_group(replayer, buffers)

    monkeypatch.setattr(Replayer, "recompute_group", failing)
    found, _, session = _train(int(0.6 * peak_bytes), "torchdelta")
    assert failures
    assert session.follower.num_followed_steps > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
