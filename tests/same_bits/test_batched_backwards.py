"""Same bits where many backwards run as one: replays of random ops do not see the transform that batches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, assert_same_bits


def _losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return torch.stack([y.square().mean(), y.sin().mean(), y.mean()])


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(3)))


def test_gradients_that_are_batched() -> None:
    """As `torch.autograd.functional.jacobian` with `vectorize=True` computes them."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = _model(), torch.randn(4, 8)
        with scope():
            losses = _losses(model, x)
            gradients = torch.autograd.grad(losses, list(model.parameters()), torch.eye(3), is_grads_batched=True)
        return {"gradients": gradients}

    assert_same_bits(step)


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_gradients_inside_of_vmap(randomness: str) -> None:
    """What is drawn was drawn in the forward, so no kind of randomness is against it."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = _model(), torch.randn(4, 8)
        with scope():
            losses = _losses(model, x)

            def gradients_of(gradient: torch.Tensor) -> Any:
                return torch.autograd.grad(losses, list(model.parameters()), gradient, retain_graph=True)

            gradients = torch.func.vmap(gradients_of, randomness=randomness)(torch.eye(3))
            losses.sum().backward()
        return {"gradients": gradients, "usual": [parameter.grad for parameter in model.parameters()]}

    assert_same_bits(step)
