"""Models and optimizers that are made while a budget of `decision_class="all"` runs: their tensors may leave, too."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from torchdelta import Config, MemoryBudget

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, DEPTH = 512, 24  # parameters of 1 MiB


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def _train(budget: int | None, *, is_made_inside: bool) -> list[bytes]:
    """Train a model and an average of it, which is made in the scope, or both in the scope."""
    model = None if is_made_inside else _model()

    def steps(model: nn.Sequential) -> list[nn.Module]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        average = copy.deepcopy(model)
        for _ in range(2):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
        return [model, average]

    if budget is None:
        trained = steps(model or _model())
    else:
        with MemoryBudget(budget, Config(decision_class="all", planner=None)) as scope:
            trained = steps(model or _model())
        assert max(step.peak_bytes for step in scope.summary().steps[1:]) <= budget
    gc.collect()
    return [parameter.detach().numpy().tobytes() for module in trained for parameter in module.parameters()]


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_copy_of_the_model_in_a_small_budget(is_made_inside: bool) -> None:
    """Parameters, states and the average take 16 budgets."""
    expected = _train(None, is_made_inside=is_made_inside)
    assert _train(6 << 20, is_made_inside=is_made_inside) == expected
