"""Optimizers that step with a closure, as Lightning's do: the closure runs the forward and the backward of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget

WIDTH = 256
NUM_LAYERS = 4
NUM_ROWS = 32
NUM_STEPS = 3
STATES_BYTES = 2 * NUM_LAYERS * WIDTH * WIDTH * 4  # of AdamW, without biases


class _Training:
    """A small model that an optimizer trains."""

    def __init__(self, make: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.optimizer = make(self.model.parameters())
        self.losses: list[str] = []

    def closure(self) -> torch.Tensor:
        """Run forward and backward."""
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(NUM_ROWS, WIDTH)).square().mean()
        loss.backward()
        return loss

    def train(self, *, by_name: bool = False) -> list[str]:
        """Run all steps. Return the bits of losses and parameters."""
        torch.manual_seed(1)
        for _ in range(NUM_STEPS):
            loss = self.optimizer.step(closure=self.closure) if by_name else self.optimizer.step(self.closure)
            assert isinstance(loss, torch.Tensor)
            self.losses.append(loss.item().hex())
        return self.losses + [bits_of(parameter) for parameter in self.model.parameters()]


def _peak_bytes(make: Any) -> int:
    """Return the peak of a training that fits."""
    training = _Training(make)
    with MemoryBudget(1 << 40, Config(tier="memory")) as budget:
        training.train()
    return budget.summary().peak_bytes


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9])
def test_a_budget_that_is_too_small_is_refused_before_the_states_are_made(share: float, by_name: bool) -> None:
    """The figure of the error is enough, and after the error the same optimizer trains in it with plain's bits."""
    plain = _Training().train()
    peak_bytes = _peak_bytes(torch.optim.AdamW)
    budget_bytes = int(share * peak_bytes)
    training = _Training()
    refused: BudgetError | None = None
    try:
        with MemoryBudget(budget_bytes, Config(tier="memory")):
            training.train(by_name=by_name)
    except BudgetError as error:
        refused = error.with_traceback(None)
    if refused is None:
        assert share > 0.7
        return
    assert not training.losses
    assert not training.optimizer.state
    assert refused.least_budget_bytes > max(budget_bytes, STATES_BYTES)
    assert not refused.is_lower_bound
    training.optimizer.zero_grad()
    with MemoryBudget(refused.least_budget_bytes, Config(tier="memory")) as budget:
        assert training.train(by_name=by_name) == plain
    assert budget.summary().peak_bytes <= refused.least_budget_bytes


def test_small_budgets_are_refused() -> None:
    """The test above does not pass because all of its budgets are enough."""
    peak_bytes = _peak_bytes(torch.optim.AdamW)
    with pytest.raises(BudgetError), MemoryBudget(int(0.6 * peak_bytes), Config(tier="memory")):
        _Training().train()


def test_an_optimizer_that_calls_its_closure_several_times_trains_as_plain() -> None:
    """L-BFGS makes its states after its first closure."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=2)

    plain = _Training(make).train()
    budget_bytes = _peak_bytes(make)
    training = _Training(make)
    with MemoryBudget(budget_bytes, Config(tier="memory")) as budget:
        assert training.train() == plain
    assert budget.summary().peak_bytes <= budget_bytes


def test_a_closure_gets_what_its_optimizer_passes_and_keeps_its_name() -> None:
    """The hook of the scope stands between the two."""
    seen: list[Any] = []

    class Passing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(closure.__name__)
            return closure(1, second=2)

    def my_closure(first: int, *, second: int) -> tuple[int, int]:
        return first, second

    optimizer: Any = Passing([nn.Parameter(torch.ones(2))], lr=0.1)
    with MemoryBudget("1GiB", Config(tier="memory")):
        assert optimizer.step(my_closure) == (1, 2)
    assert seen == ["my_closure"]


def test_a_later_closure_that_does_not_fit_is_surveyed_to_its_end() -> None:
    """It is no part of the optimizer's own step, of which the rest is not surveyed."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            closure(NUM_ROWS)
            return closure(128 * NUM_ROWS)

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer: Any = Twice(model.parameters(), lr=0.1)

    def closure(num_rows: int) -> None:
        optimizer.zero_grad()
        hidden = torch.randn(num_rows, WIDTH)
        for layer in model:
            hidden = layer(hidden).sin()
        hidden.square().mean().backward()

    with MemoryBudget(1 << 40, Config(tier="memory")) as unlimited:
        optimizer.step(closure)
    budget_bytes = int(0.2 * unlimited.summary().peak_bytes)
    with pytest.raises(BudgetError) as raised, MemoryBudget(budget_bytes, Config(tier="memory")):
        optimizer.step(closure)
    assert not raised.value.is_lower_bound
    assert raised.value.least_budget_bytes > budget_bytes
    with MemoryBudget(raised.value.least_budget_bytes, Config(tier="memory")) as budget:
        optimizer.step(closure)
    assert budget.summary().peak_bytes <= raised.value.least_budget_bytes
