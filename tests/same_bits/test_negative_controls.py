"""Negative controls: with a safeguard of the engine switched off, the comparison has to fail.

A judge that never says no proves nothing. Each test first shows that the step passes with the safeguard on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.switches import disabled
from tests.same_bits.judge import DECISIONS, Scope, judge, state_of


def dropout_step(scope: Scope) -> dict[str, Any]:
    """Train through dropout, whose mask only the generator's old state gives again."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5))
    with scope():
        model(torch.randn(6, 8)).pow(2).sum().backward()
    return state_of(model)


def batch_norm_step(scope: Scope) -> dict[str, Any]:
    """Train through batch norm, whose forward writes its running statistics each time that it runs."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    with scope():
        model(torch.randn(6, 8)).pow(3).sum().backward()
    return state_of(model)


@pytest.mark.parametrize(
    ("name", "step"),
    [("rng-replay", dropout_step), ("batch-norm-stats", batch_norm_step)],
    ids=["rng-replay", "batch-norm-stats"],
)
def test_without_the_safeguard_the_bits_differ(name: str, step: Any) -> None:
    """Replaying with the wrong random numbers, or into live statistics, is seen."""
    assert judge(step, DECISIONS["recompute"]) == []
    with disabled(name):
        assert judge(step, DECISIONS["recompute"]) != []
    assert judge(step, DECISIONS["recompute"]) == []
