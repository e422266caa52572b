"""A backward that returns a saved tensor itself as the gradient of a parameter."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from torchdelta import Config, MemoryBudget

NUM_ELEMENTS = 4096  # large enough to leave


class _Inject(torch.autograd.Function):
    """A loss whose gradient was computed before."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


@pytest.mark.parametrize("decisions", [None, "swap", "recompute"])
@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("retains", [False, True])
def test_the_gradient_of_a_leaf_shares_no_memory_with_the_programs_tensor(
    retains: bool, is_made_inside: bool, decisions: Any
) -> None:
    """Without a budget it is a copy, because the program still holds the tensor. Later `.grad` is written in place."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
        parameter, gradient = nn.Parameter(torch.zeros(NUM_ELEMENTS)), torch.ones(NUM_ELEMENTS)
        seen = []
        with scope:
            for index in range(6):
                if is_made_inside:
                    gradient = torch.full((NUM_ELEMENTS,), float(index)) + 1.0
                loss = _Inject.apply(parameter, gradient)
                for _ in range(1 + retains):
                    loss.backward(retain_graph=retains)
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
                seen += [gradient.clone(), parameter.grad.clone()]
        return seen

    plain = train(contextlib.nullcontext())
    found = train(MemoryBudget("1GiB", Config(planner=None, decisions=decisions)))
    assert [index for index in range(len(plain)) if not torch.equal(plain[index], found[index])] == []


def test_the_saved_tensor_is_the_programs_own() -> None:
    """With the attributes that the program has set on it."""
    gradient: Any = torch.ones(NUM_ELEMENTS)
    gradient.tag = "mine"
    parameter = nn.Parameter(torch.zeros(NUM_ELEMENTS))
    with MemoryBudget("1GiB", Config(planner=None)):
        loss = _Inject.apply(parameter, gradient)
        (saved,) = loss.grad_fn.saved_tensors
        assert saved is gradient
        loss.backward()


def test_a_saved_tensor_that_only_autograd_holds_becomes_the_gradient() -> None:
    """Nothing is copied, as without a budget: the copy might not fit."""
    parameter = nn.Parameter(torch.zeros(NUM_ELEMENTS))
    with MemoryBudget("1GiB", Config(planner=None)):
        gradient = torch.full((NUM_ELEMENTS,), 1.0) + 1.0
        address = gradient.data_ptr()
        loss = _Inject.apply(parameter, gradient)
        del gradient
        loss.backward()
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == address
