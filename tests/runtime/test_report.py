"""What a run logs, and what its summary says of its cost."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from tests.native.without import but_of_absence
from tests.runtime.programs import UNLIMITED, mlp, running
from torchdelta import MemoryBudget


def train(num_steps: int = 3) -> None:
    """Train a small perceptron."""
    model = mlp(64, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.randn(256, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("budget", "first"), [(UNLIMITED, "it fits, nothing was evicted"), (2**20, "peak ")])
def test_a_run_logs_a_few_readable_lines(budget: str | int, first: str, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO: what starts, how the first step went, the result. However many steps there are."""
    with caplog.at_level(logging.INFO, "torchdelta"), running(budget):
        train()
    messages = but_of_absence(record.getMessage() for record in caplog.records)
    assert [message.partition(":")[0] for message in messages] == ["start", "first step", "result"]
    assert messages[0].endswith(" on cpu, policy torchdelta, tier memory")
    assert messages[1].startswith(f"first step: {first}")
    assert "; 3 steps" in messages[2]
    assert re.search(r"at least x[0-9.]+ of the plain time$", messages[2]) or budget == UNLIMITED
    assert {record.name for record in caplog.records} == {"torchdelta"}


def test_a_scope_without_a_step_says_so(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Else a loop on another thread would look like one that fits; and nothing is printed."""
    with caplog.at_level(logging.INFO, "torchdelta"), running():
        pass
    assert caplog.messages[-1] == "result: no training step was seen on this thread"
    assert capfd.readouterr().out == ""


def test_slowdown_is_known_without_a_plan() -> None:
    """Reactive steps: two bounds, of which the lower one counts replays and waits; a step that fits has neither."""
    with running(2**20, policy="recompute-only") as (budget, _):
        train()
    summary = budget.summary()
    assert summary.recompute_s > 0
    assert summary.evict_s > 0
    assert summary.slowdown_at_least is not None
    assert summary.slowdown_at_most is not None
    assert 1 < summary.slowdown_at_least < summary.slowdown_at_most
    assert summary.evict_s == pytest.approx(sum(step.evict_s for step in summary.steps))
    with MemoryBudget(UNLIMITED) as budget:
        train()
    assert budget.summary().slowdown_at_least == 1
