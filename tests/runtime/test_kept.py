"""What a summary calls kept: the saved buffers that never left, each counted once."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.programs import mlp, running
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.policies.base import Action


def test_a_buffer_that_is_dropped_twice_counts_once() -> None:
    """A kept graph: the first backward brings it back, and it leaves again."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (budget, session):
        total = (x * 2).sin().exp().sum()  # sin saves its input, exp its output
        dropped = next(buffer for buffer in session.ledger.held.values() if buffer.origin == "aten.mul.Tensor")
        for _ in range(2):
            session.room.evict(dropped, Action.RECOMPUTE)
            total.backward(retain_graph=True)
        del total
    assert session.counters.dropped_bytes == 2 * x.nbytes
    assert budget.summary().kept_bytes == x.nbytes


def test_parameters_that_leave_were_not_saved() -> None:
    """With decision_class="all" parameters and optimizer states are swapped, too."""
    model = mlp(512, 4)
    optimizer = torch.optim.Adam(model.parameters())
    config = Config(decision_class="all", tier="memory")
    with MemoryBudget("12MiB", config) as budget:
        for _ in range(3):
            model(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    step = budget.summary().steps[-1]
    saved_bytes = 4 * 64 * 512 * 4
    assert step.swapped_out_bytes > 2 * saved_bytes
    assert step.kept_bytes >= saved_bytes


def test_what_a_survey_saves_is_not_kept() -> None:
    """The search for the least budget runs the rest of the step on fake tensors."""
    model, x = mlp(256, 8), torch.randn(2048, 256)
    budget = MemoryBudget("8MiB", Config(tier="memory"))
    with pytest.raises(BudgetError), budget:
        model(x).square().mean().backward()
    assert 0 < budget.summary().kept_bytes <= budget.budget_bytes
