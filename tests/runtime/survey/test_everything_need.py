"""The least budget that is named where parameters, gradients and optimizer states leave, too."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.advice import Run, follow, language_model
from tests.runtime.programs import mlp, running
from tests.same_bits.test_everything_swaps import adamw, parameter_bytes
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
    return (2 + num_states) * parameter_bytes(model)


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


@pytest.mark.parametrize("optimizer_of", [adamw, foreach])
@pytest.mark.parametrize("share", [2.2, 2.7])
def test_an_optimizer_is_refused_before_it_steps(
    optimizer_of: Callable[[Any], torch.optim.Optimizer], share: float
) -> None:
    """An op of its step needs more than the pass: no parameter is changed, and no state is left half made."""
    torch.manual_seed(0)
    model, loss_of = one_large_layer()
    optimizer = optimizer_of(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    outputs = []
    gc.collect()
    with running(int(share * largest_bytes) + parameter_bytes(model), decision_class="all"):  # the copies stay
        outputs.append(loss_of())
        outputs[0].backward()
        for _ in range(2):  # the program may try again
            with pytest.raises(BudgetError) as caught:
                optimizer.step()
    assert caught.value.op == "the step of AdamW"
    assert caught.value.least_budget_bytes == sum(caught.value.groups.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any(optimizer.state.values())


def test_where_a_step_decides_hardly_less_is_enough() -> None:
    """The largest op of Adam's step reads a parameter and its state, and has one temporary: not all states at once."""
    run = Run(make_optimizer=adamw)
    named_bytes = follow(one_large_layer, run, 64 * KIB, decision_class="all").named_bytes[-1]
    model, _ = one_large_layer()
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    del model
    assert named_bytes < 3.5 * largest_bytes
    torch.manual_seed(0)
    with pytest.raises(BudgetError), running(int(0.85 * named_bytes), decision_class="all"):
        run.train(*one_large_layer())


def embedding() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return an embedding with sparse gradients, and a layer."""
    model = nn.Sequential(nn.Embedding(2000, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    ids = torch.randint(0, 2000, (16,))
    return model, lambda: model(ids).square().mean()


class Joined(nn.Module):
    """A layer whose weight is joined from three parameters: their gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return nn.functional.linear(x, torch.cat(list(self.parts)))


def joined() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return layers whose gradients share memory."""
    model, x = nn.ModuleList([Joined() for _ in range(4)]), torch.randn(8, WIDTH)
    return model, lambda: torch.stack([layer(x).square().mean() for layer in model]).sum()


def many_small() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return layers whose parameters are too small to leave."""
    model, x = nn.Sequential(*[nn.Linear(31, 31) for _ in range(40)]), torch.randn(8, 31)
    return model, lambda: model(x).square().mean()


@pytest.mark.parametrize(
    ("make", "optimizer_of"),
    [(embedding, sgd), (joined, adamw), (joined, foreach), (many_small, adamw), (many_small, fused)],
)
def test_other_parameters(make: Callable[[], Any], optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Sparse gradients, gradients that share memory, and parameters that are too small to leave."""
    run = Run(make_optimizer=optimizer_of)
    followed = follow(make, run, 16 * KIB, decision_class="all")
    assert all(torch.equal(a, b) for a, b in zip(followed.result, plain(make, run), strict=True))
    assert 1 <= len(followed.named_bytes) <= 2


def test_without_an_optimizer() -> None:
    """Parameters that no module and no optimizer holds stay, and so do their gradients."""

    def train(budget_bytes: int) -> int:
        gc.collect()
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(8)]
        x = torch.randn(8, WIDTH)
        named_bytes = 0
        try:
            with running(budget_bytes, decision_class="all"):
                for _ in range(2):
                    y = x
                    for weight in weights:
                        y = torch.tanh(y @ weight)
                    y.sum().backward()
                    with torch.no_grad():
                        for weight in weights:
                            assert weight.grad is not None
                            weight.sub_(weight.grad, alpha=0.1)
        except BudgetError as error:
            named_bytes = error.least_budget_bytes
        return named_bytes

    named_bytes = train(64 * KIB)
    assert named_bytes > 8 * WIDTH * WIDTH * 4
    assert train(named_bytes) == 0


def test_a_step_of_few_parameters_of_a_trained_optimizer() -> None:
    """States of parameters that are not stepped do not count."""
    torch.manual_seed(0)
    large, small = nn.Linear(512, 512), nn.Linear(WIDTH, WIDTH)
    optimizer = adamw([*large.parameters(), *small.parameters()])
    large(torch.randn(2, 512)).sum().backward()
    small(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = small.weight.detach().clone()
    with running(parameter_bytes(large), decision_class="all") as (budget, _):
        for _ in range(3):
            small(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(small.weight, before)
    assert all(step.peak_bytes <= budget.budget_bytes for step in budget.summary().steps[1:])


def test_what_the_error_lists_is_what_it_names() -> None:
    """Tensors that could be swapped out are not listed as what takes the memory."""
    torch.manual_seed(0)
    with pytest.raises(BudgetError) as caught, running(128 * KIB, decision_class="all"):
        Run(make_optimizer=adamw).train(*perceptron())
    error = caught.value
    assert sum(error.groups.values()) == error.least_budget_bytes
    assert error.groups.get("parameters", 0) < persistent_bytes(perceptron, 0) // 2
