"""Whose tensors leave in the decision class "all", and when: frozen models, states made in backward, first ops."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.parts import is_emptied
from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    Train = Callable[[contextlib.AbstractContextManager[Any]], tuple[torch.nn.Module, Any]]

WIDTH = 128


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW, one parameter at a time."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def layers(count: int = 12) -> torch.nn.Sequential:
    """Return linear layers. Each takes 65 KiB."""
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def train_three_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scope: contextlib.AbstractContextManager[Any],
    num_rows: int = 4,
) -> None:
    """Train on random rows, inside the scope."""
    with scope:
        for _ in range(3):
            model(torch.randn(num_rows, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_trains_alike(train: Train, budget_bytes: int) -> None:
    """Check that a training in a budget gives the bits that it gives without one, and keeps to the budget."""

    def run(scope: contextlib.AbstractContextManager[Any]) -> list[Any]:
        torch.manual_seed(0)
        model, more = train(scope)
        return [bits_of(model.state_dict()), bits_of(more)]

    scope = MemoryBudget(budget_bytes, Config(decision_class="all", tier="memory"))
    assert run(scope) == run(contextlib.nullcontext())
    steps = scope.summary().steps
    assert len(steps) > 1
    assert all(step.peak_bytes <= budget_bytes for step in steps[1:])


@pytest.mark.parametrize("extra_kib", [-16, 0, 8])
def test_a_budget_near_what_is_there_at_the_start(extra_kib: int) -> None:
    """The first op, which reads no parameter, may pass a budget that holds the parameters, as one that does not."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> tuple[torch.nn.Module, Any]:
        model = layers()
        optimizer = adamw(model.parameters())
        train_three_steps(model, optimizer, scope, num_rows=32)
        return model, None

    assert_trains_alike(train, parameter_bytes(layers()) + (extra_kib << 10))


def test_what_nobody_owns_does_not_pass_the_budget() -> None:
    """The negative control: small tensors that are made in the scope, before any parameter is known, have no excuse."""
    kept: list[torch.Tensor] = []
    budget = MemoryBudget("16MiB", Config(decision_class="all"))
    with pytest.raises(BudgetError), budget:
        kept.extend(torch.ones(2**16) for _ in range(80))
    assert budget.summary().peak_bytes <= budget.budget_bytes


class Adapted(torch.nn.Module):
    """A frozen linear layer with a small adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, 4, bias=False)
        self.up = torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus what the layer and its adapter make of it."""
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def test_a_frozen_model_below_its_parameters() -> None:
    """The frozen parameters, which no optimizer has, leave before the first op has read them."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Sequential(*[Adapted() for _ in range(12)])
        optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
        train_three_steps(model, optimizer, scope)
        return model, optimizer.state_dict()["state"]

    assert_trains_alike(train, int(0.6 * parameter_bytes(torch.nn.Sequential(*[Adapted() for _ in range(12)]))))


def test_an_evaluation_below_the_parameters() -> None:
    """A model that no optimizer trains leaves as well, and one that the scope does not use stays."""
    model, other = layers(), layers()
    x = torch.randn(4, WIDTH)
    expected = model(x)
    with torch.no_grad(), MemoryBudget(int(1.6 * parameter_bytes(model)), Config(decision_class="all", tier="memory")):
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert any(is_emptied(parameter) for parameter in model.parameters())
        assert not any(is_emptied(parameter) for parameter in other.parameters())


@pytest.mark.parametrize("share", [1.4, 2.2])
def test_optimizers_that_step_in_the_backward(share: float) -> None:
    """The states that they make in the backward leave."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> tuple[torch.nn.Module, Any]:
        model = layers()
        optimizers = {parameter: adamw([parameter]) for parameter in model.parameters()}

        def step_now(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_now)
        with scope:
            for _ in range(3):
                model(torch.randn(4, WIDTH)).square().mean().backward()
        return model, [optimizer.state_dict()["state"] for optimizer in optimizers.values()]

    assert_trains_alike(train, int(share * parameter_bytes(layers())))


def test_gradients_that_a_hook_reads_in_the_backward() -> None:
    """They leave as all others do."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> tuple[torch.nn.Module, Any]:
        model, norms = layers(), []
        optimizer = adamw(model.parameters())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda leaf: norms.append(leaf.grad.norm()))
        train_three_steps(model, optimizer, scope)
        return model, norms

    assert_trains_alike(train, int(1.2 * parameter_bytes(layers())))
