"""What a BudgetError names where gradients are freed or moved in the backward."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdelta import BudgetError, Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10
CONFIG = Config(tier="memory", planner=None)
NUM_LAYERS = 12
WIDTH = 256  # a weight has 256 KiB


def _error_of(train: Callable[[int], object], budget_bytes: int) -> BudgetError:
    """Return the error of a training that does not fit, without the tensors that its traceback holds."""
    with pytest.raises(BudgetError) as caught:
        train(budget_bytes)
    error = caught.value.with_traceback(None)
    error.__cause__ = error.__context__ = None
    del caught
    gc.collect()
    return error


def _update_by_hand(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def _train(budget: int | str, *, steps_by: str) -> MemoryBudget:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    hook: Callable[[torch.Tensor], None] = _update_by_hand if steps_by == "hand" else step
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()]
    x = torch.randn(16, WIDTH)
    try:
        with MemoryBudget(budget, CONFIG) as memory_budget:
            for _ in range(3):
                model(x).sum().backward()
    finally:  # torch's own reference cycle: parameter, hook, optimizer, parameter
        for handle in handles:
            handle.remove()
    return memory_budget


@pytest.mark.parametrize("steps_by", ["hand", "an optimizer"])
def test_gradients_that_are_freed_in_the_backward_do_not_add_up(steps_by: str) -> None:
    """A bound is one, and what is named as enough is enough."""
    peak_bytes = _train("1TiB", steps_by=steps_by).summary().peak_bytes
    gc.collect()
    error = _error_of(lambda budget: _train(budget, steps_by=steps_by), int(0.9 * peak_bytes))
    assert error.is_lower_bound == (steps_by != "hand")
    assert error.least_budget_bytes <= 1.02 * peak_bytes
    if not error.is_lower_bound:
        assert _train(error.least_budget_bytes, steps_by=steps_by).summary().peak_bytes <= error.least_budget_bytes


def test_gradients_that_are_moved_in_the_backward_add_up() -> None:
    """As to the master gradients of mixed precision: what is named as enough is enough."""

    def train(budget: Any) -> MemoryBudget:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
        main: dict[torch.Tensor, torch.Tensor] = {}

        def move(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            main[parameter] = main[parameter] + parameter.grad if parameter in main else parameter.grad
            parameter.grad = None

        handles = [parameter.register_post_accumulate_grad_hook(move) for parameter in model.parameters()]
        x = torch.randn(16, WIDTH)
        try:
            with MemoryBudget(budget, CONFIG) as memory_budget:
                for _ in range(3):
                    model(x).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
            main.clear()
        return memory_budget

    peak_bytes = train("1TiB").summary().peak_bytes
    gc.collect()
    error = _error_of(train, int(0.7 * peak_bytes))
    assert not error.is_lower_bound
    assert train(error.least_budget_bytes).summary().peak_bytes <= error.least_budget_bytes
