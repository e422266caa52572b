"""Memory that a program counts on has been released before the program copies more in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.following import follow_anyway, planned_here
from tests.runtime.follow.all_away import all_away
from tests.runtime.programs import UNLIMITED, running
from torchdelta.runtime.memory.transfers import Transfers
from torchdelta.runtime.tiers.copier import Copier

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, NUM_ROWS, DEPTH, NUM_STEPS = 64, 256, 6, 5


def test_copies_out_have_ended_before_copies_in_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies out that do not end by themselves are waited for at the moment that the plan gives."""
    waited_for = threading.Event()  # no copy out ends before this
    write_part, finish_first, start_fetch = Copier.copy_part, Transfers.finish_first, Transfers.start_fetch
    num_waits = 0
    leaving_at_fetches: list[int] = []

    def write_late(copier: Copier, worker: int, job: Any, part: Any) -> BaseException | None:
        if not job.is_read:
            assert waited_for.wait(60)
        return write_part(copier, worker, job, part)

    def wait(transfers: Transfers) -> None:
        nonlocal num_waits
        num_waits += 1
        waited_for.set()
        finish_first(transfers)

    def start_fetch_noted(transfers: Transfers, *arguments: Any) -> None:
        leaving_at_fetches.append(len(transfers.leaving))
        start_fetch(transfers, *arguments)

    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    rows = torch.randn(NUM_ROWS, WIDTH)
    model(rows).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with (
        planned_here(lambda trace, _machine, _budget_bytes: all_away(trace, "swap", at_use=True)),
        running(UNLIMITED, planner="torchdelta", tier="memory") as (_, session),
    ):
        follow_anyway(session)
        session.pause.forbid()
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                monkeypatch.setattr(Copier, "copy_part", write_late)
                monkeypatch.setattr(Transfers, "finish_first", wait)
                monkeypatch.setattr(Transfers, "start_fetch", start_fetch_noted)
            model.zero_grad()
            model(rows).square().mean().backward()
        num_followed = session.follower.num_followed_steps
        num_leaving = len(session.follower.transfers.leaving)
    assert num_followed >= 2
    assert num_leaving == 0
    assert num_waits == len(leaving_at_fetches) > DEPTH
    assert set(leaving_at_fetches) == {0}
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
