"""What the library asks of tensors never raises where eager training asks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = "8GiB"
OPTIMIZERS = ["SGD", "Adam", "Adagrad", "Adadelta", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]


def view_that_torch_refuses() -> torch.Tensor:
    """Return a view made in `no_grad` whose base was written afterwards."""
    base = torch.ones(4, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    return view


def complex_step(name: str, *, foreach: bool, scope: Any) -> torch.Tensor:
    """Train a complex parameter for two steps and return it."""
    torch.manual_seed(0)
    parameter = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, foreach=foreach)
    x = torch.randn(5, 5, dtype=torch.complex64)
    with scope:
        for _ in range(2):
            (parameter @ x).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameter.detach()


@pytest.mark.parametrize("decisions", [None, "recompute"])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_complex_parameters(*, foreach: bool, decisions: str | None) -> None:
    """Optimizers write complex parameters through real views; the result has the bits of the plain run."""
    for name in OPTIMIZERS:
        plain = complex_step(name, foreach=foreach, scope=torch.enable_grad())
        ours = complex_step(name, foreach=foreach, scope=MemoryBudget(BUDGET, Config(decisions=decisions)))
        assert torch.equal(ours, plain), name


def test_a_backward_from_such_a_view_raises_torchs_own_error() -> None:
    """Where eager asks, and refuses, its own message comes through."""
    with pytest.raises(RuntimeError) as plain:
        view_that_torch_refuses().backward(torch.ones(2))
    with MemoryBudget(BUDGET), pytest.raises(RuntimeError) as ours:
        view_that_torch_refuses().backward(torch.ones(2))
    assert str(ours.value) == str(plain.value)


META_FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(3, 4, device="meta"),
    "randperm": lambda: torch.randperm(5, device="meta"),
    "randn_like": lambda: torch.randn_like(torch.ones(3, device="meta")),
    "normal_": lambda: torch.nn.init.normal_(torch.empty(3, device="meta")),
    "linear": lambda: torch.nn.Linear(3, 4, device="meta").weight,
    "embedding": lambda: torch.nn.Embedding(3, 4, device="meta").weight,
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3, device="meta", requires_grad=True)),
}


@pytest.mark.parametrize("name", META_FACTORIES)
def test_random_ops_on_meta_draw_nothing(name: str) -> None:
    """They make what they make without a budget, and the generator of the CPU stays where it is."""
    plain = META_FACTORIES[name]()
    state = torch.get_rng_state()
    with MemoryBudget(BUDGET):
        ours = META_FACTORIES[name]()
    assert (ours.shape, ours.dtype, ours.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_error_of_a_changed_nested_tensor_is_torchs_own() -> None:
    """A nested tensor has no shape to put into the message; the rest of it is eager's."""

    def message() -> str:
        x = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], requires_grad=True)
        y = x.clone()
        z = y * y
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            torch.nested.to_padded_tensor(z, 0.0).sum().backward()
        return str(caught.value)

    assert "is at version 1; expected version 0" in message()
    with MemoryBudget(BUDGET):
        ours = message()
    assert "is at version 1; expected version 0" in ours
    assert "[[2, 3], [4, 3]]" in ours
