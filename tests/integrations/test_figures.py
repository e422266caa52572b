"""The figures that the integrations log."""

from __future__ import annotations

from torch import nn, randn

from torchdelta import Config, MemoryBudget
from torchdelta.integrations.figures import Figures


def test_a_step_whose_optimizer_is_skipped_has_a_peak() -> None:
    """A GradScaler skips it on overflow. Then the step of the budget ends with the next forward, not here."""
    model, figures = nn.Linear(64, 64), Figures()
    with MemoryBudget("1GiB", Config(planner=None)) as budget:
        before = budget.totals()
        loss = model(randn(1024, 64)).square().sum()
        loss.backward()
        after = budget.totals()
        assert not budget.steps_since(0)
        figures.add(1.0, before, after, budget.steps_since(0))
        peak_bytes = budget.summary().peak_bytes
    assert figures.values()["torchdelta/peak_gib"] == round(peak_bytes / 2**30, 6) > 0
