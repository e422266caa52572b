"""Without the C++ modules nothing measures the workspace of ops: room for all that they may take is made each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.soak import subjects
from tests.runtime.programs import Allocations
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from benchmarks.soak.subjects import Subject

PLAN_WAIT_S = 60.0


def train(subject: Subject, num_steps: int = 1) -> None:
    """Train on the largest batch."""
    for _ in range(num_steps):
        subject.loss(*subjects.LARGEST).backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()


def pressing_budget(subject: Subject, share: float) -> int:
    """Return the bytes at rest and a share of what a step adds to them."""
    with MemoryBudget("1TiB") as budget:
        train(subject, 2)
        rest_bytes = current_session().ledger.usage.live_bytes
        train(subject)
    return rest_bytes + int(share * (budget.summary().steps[-1].peak_bytes - rest_bytes))


@pytest.mark.parametrize("planner", [None, "torchdelta"])
@pytest.mark.parametrize(("name", "share"), [("gpt", 0.6), ("conv", 0.6), ("unet", 0.8)])
def test_a_step_keeps_to_its_budget_by_torchs_profiler(
    name: str, share: float, planner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its shapes are known, whether it reacts or follows a plan."""
    monkeypatch.setenv("TORCHDELTA_NATIVE", "0")
    subject = subjects.build(name, seed=0)
    budget_bytes = pressing_budget(subject, share)
    config = Config(policy="swap-only" if planner is None else "torchdelta", planner=planner, tier="memory")
    with MemoryBudget(budget_bytes, config):
        session = current_session()
        assert session.ledger.usage.counter is None
        train(subject, 2)
        if planner is not None:
            assert session.programs.wait(PLAN_WAIT_S), session.programs.why_no_plan
            train(subject, 3)
        allocations = Allocations()
        start_bytes = session.ledger.usage.live_bytes
        with allocations.watch():
            train(subject)
        assert allocations.live_bytes == 0
        assert session.counters.num_evictions > 0
        assert planner is None or session.follower.num_followed_steps > 0
    assert start_bytes + allocations.peak_bytes <= budget_bytes
