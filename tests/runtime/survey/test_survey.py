"""What an impossible budget is answered with."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from tests.runtime.programs import mlp, running, same_bits, train
from torchdelta import BudgetError


def _least_budget_bytes(budget_bytes: int) -> int:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    exact = pytest.raises(BudgetError, match=r"The least budget for this run is [0-9]")
    with warnings.catch_warnings(action="error"), running(budget_bytes, policy="recompute-only"), exact as kept:
        train(model, x)
    return kept.value.least_budget_bytes


def test_filters_that_raise_do_not_end_a_survey() -> None:
    """Torch warns of what it does itself with fake tensors: an impossible budget has its exact answer all the same."""
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    gc.collect()
    with running() as (budget, session):
        beside_bytes = session.ledger.usage.live_bytes - sum(p.nbytes for p in model.parameters()) - x.nbytes
        expected = train(model, x)
    del model, x
    gc.collect()
    least_bytes = _least_budget_bytes(beside_bytes + (budget.summary().peak_bytes - beside_bytes) // 5)
    gc.collect()  # what the error's traceback held
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running(least_bytes + 64, policy="recompute-only"):  # and the loss of the first step, which the second meets
        assert same_bits(train(model, x), expected)
