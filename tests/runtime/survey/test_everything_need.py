"""The least budget that is named where parameters, gradients and optimizer states leave, too."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.advice import Run, follow, language_model
from tests.runtime.programs import mlp, running
from torchdelta import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10
WIDTH = 128  # a weight takes 64 KiB


class Momentum(torch.optim.Optimizer):
    """SGD with momentum of somebody else, one parameter at a time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step all parameters."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = parameter.grad + 0.9 * state.get("momentum", 0.0)
                parameter.sub_(group["lr"] * state["momentum"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without states."""
    return torch.optim.SGD(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW, one parameter at a time."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW on lists."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW in one kernel."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def perceptron() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a perceptron whose parameters take much more than its activations."""
    model, x = mlp(WIDTH, 8), torch.randn(8, WIDTH)
    return model, lambda: model(x).square().mean()


def one_large_layer() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a network of which one parameter takes more than the others: its step of the optimizer needs the most."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 12 * WIDTH))
    x = torch.randn(8, WIDTH)
    return model, lambda: model(x).square().mean()


def plain(make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], run: Run) -> list[torch.Tensor]:
    """Return the parameters after the same run without a budget."""
    torch.manual_seed(0)
    return run.train(*make())


def persistent_bytes(make: Callable[[], tuple[nn.Module, Any]], num_states: int) -> int:
    """Return what parameters, gradients and optimizer states take together."""
    model, _ = make()
    return (2 + num_states) * sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("make", [perceptron, one_large_layer, language_model])
@pytest.mark.parametrize(("optimizer_of", "num_states"), [(sgd, 0), (adamw, 2), (foreach, 2), (fused, 2)])
def test_the_named_budget_is_enough_and_below_what_persists(
    make: Callable[[], Any], optimizer_of: Callable[[Any], torch.optim.Optimizer], num_states: int
) -> None:
    """At most one more budget is named after the first, and with the last one the bits are plain's."""
    follow(make, Run(make_optimizer=optimizer_of, num_steps=1), "1GiB")  # imports what it needs
    run = Run(make_optimizer=optimizer_of)
    followed = follow(make, run, 64 * KIB, decision_class="all")
    assert all(torch.equal(a, b) for a, b in zip(followed.result, plain(make, run), strict=True))
    assert 1 <= len(followed.named_bytes) <= 2
    if num_states and make is not one_large_layer:  # there one parameter takes nearly all
        assert followed.named_bytes[-1] < persistent_bytes(make, num_states)
    gc.collect()
    saved = follow(make, run, 64 * KIB)
    assert followed.named_bytes[-1] < saved.named_bytes[-1]


def test_hardly_less_is_enough() -> None:
    """Most of the named budget is needed: three quarters of it are refused."""
    run = Run(make_optimizer=adamw)
    named_bytes = follow(perceptron, run, 64 * KIB, decision_class="all").named_bytes[-1]
    gc.collect()
    torch.manual_seed(0)
    with pytest.raises(BudgetError), running(named_bytes * 3 // 4, decision_class="all"):
        run.train(*perceptron())


@pytest.mark.parametrize(
    "run",
    [
        Run(make_optimizer=adamw, num_micro_batches=2),
        Run(make_optimizer=adamw, sets_to_none=False),
        Run(make_optimizer=foreach, clips=True),
        Run(make_optimizer=Momentum),
    ],
    ids=["micro-batches", "zeroed gradients", "clipping", "somebody's optimizer"],
)
def test_other_loops(run: Run) -> None:
    """The named budget is enough for them, too."""
    followed = follow(perceptron, run, 64 * KIB, decision_class="all")
    assert all(torch.equal(a, b) for a, b in zip(followed.result, plain(perceptron, run), strict=True))
    assert 1 <= len(followed.named_bytes) <= 2


def test_an_optimizer_is_refused_before_it_steps() -> None:
    """Its first step needs more than the pass: no parameter is changed, and no state is left half made."""
    torch.manual_seed(0)
    model, loss_of = one_large_layer()
    optimizer = adamw(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    with running(4 * largest_bytes, decision_class="all"):
        loss_of().backward()
        with pytest.raises(BudgetError) as caught:
            optimizer.step()
    assert caught.value.op == "the step of AdamW"
    assert caught.value.least_budget_bytes == sum(caught.value.groups.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any(optimizer.state.values())


def test_what_the_error_lists_is_what_it_names() -> None:
    """Tensors that could be swapped out are not listed as what takes the memory."""
    torch.manual_seed(0)
    with pytest.raises(BudgetError) as caught, running(256 * KIB, decision_class="all"):
        Run(make_optimizer=adamw).train(*perceptron())
    error = caught.value
    assert sum(error.groups.values()) == error.least_budget_bytes
    assert error.groups.get("parameters", 0) < persistent_bytes(perceptron, 0) // 2
