"""What a BudgetError names where gradients are freed or moved in the backward."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

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


def _train(budget: int | str, hook_of: Callable[[nn.Module], Callable[[torch.Tensor], None]]) -> MemoryBudget:
    """Train with a hook that takes each gradient as it comes. `hook_of`: returns it, for a model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    hook = hook_of(model)
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


def _by_hand(model: nn.Module) -> Callable[[torch.Tensor], None]:
    del model
    return _update_by_hand


def _by_optimizers(model: nn.Module) -> Callable[[torch.Tensor], None]:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    return step


def _moving(model: nn.Module) -> Callable[[torch.Tensor], None]:
    del model
    main: dict[torch.Tensor, torch.Tensor] = {}

    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        main[parameter] = main[parameter] + parameter.grad if parameter in main else parameter.grad
        parameter.grad = None

    return move


@pytest.mark.parametrize("hook_of", [_by_hand, _by_optimizers])
def test_gradients_that_are_freed_in_the_backward_do_not_add_up(
    hook_of: Callable[[nn.Module], Callable[[torch.Tensor], None]],
) -> None:
    """A bound is one, and what is named as enough is enough."""
    peak_bytes = _train("1TiB", hook_of).summary().peak_bytes
    gc.collect()
    error = _error_of(lambda budget: _train(budget, hook_of), int(0.9 * peak_bytes))
    assert error.is_lower_bound == (hook_of is _by_optimizers)
    assert error.least_budget_bytes <= 1.02 * peak_bytes
    if not error.is_lower_bound:
        assert _train(error.least_budget_bytes, hook_of).summary().peak_bytes <= error.least_budget_bytes


def test_gradients_that_are_moved_in_the_backward_add_up() -> None:
    """As to the master gradients of mixed precision: what is named as enough is enough."""
    peak_bytes = _train("1TiB", _moving).summary().peak_bytes
    gc.collect()
    error = _error_of(lambda budget: _train(budget, _moving), int(0.7 * peak_bytes))
    assert not error.is_lower_bound
    assert _train(error.least_budget_bytes, _moving).summary().peak_bytes <= error.least_budget_bytes
