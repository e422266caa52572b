"""`torch.func` transforms inside a budget: what they take counts, is given room, and never goes unsaid."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from tests.runtime.parts import running_session
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.trace.validate import validate

MIB = 2**20


def model_and_data() -> tuple[nn.Sequential, torch.Tensor]:
    """Build a perceptron of 128 KiB and 64 rows for it."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(2)]), torch.randn(64, 128)


def per_sample_norms(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the norms of the gradients of each row's own loss, which are 8 MiB on the way."""

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (row[None],)).square().sum()

    def norms(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: g.norm() for name, g in grad(loss)(parameters, row).items()}

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return vmap(norms, in_dims=(None, 0))(parameters, x)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Save four times the bytes of `x` for a derivative."""
    return (x * 2).sin().exp().tanh().sum()


def train() -> list[torch.Tensor]:
    """Save 6 MiB for a backward, take another derivative by a transform meanwhile, and return both gradients."""
    a = torch.linspace(-1, 1, 2 * MIB // 4).requires_grad_()
    total = chain(a)
    other = grad(chain)(a.detach())
    total.backward()
    assert a.grad is not None
    return [a.grad, other]


def test_what_was_saved_outside_makes_room_inside() -> None:
    """A transform that only fits beside less is given that, in the first step already, and the bits are plain's."""
    plain = train()
    with MemoryBudget("1TiB") as unlimited:
        train()
    budget_bytes = unlimited.summary().peak_bytes - 4 * MIB
    with MemoryBudget(budget_bytes, Config(tier="memory")) as budget:
        are_same = [torch.equal(a, b) for _ in range(2) for a, b in zip(plain, train(), strict=True)]
    summary = budget.summary()
    assert are_same == [True] * 4
    assert summary.peak_bytes <= budget_bytes
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


def test_a_transform_that_cannot_fit_is_a_budget_error() -> None:
    """It is told by the end of the transform, before anything without content could reach the caller's variables."""
    model, x = model_and_data()
    result: Any = None
    budget = MemoryBudget(4 * MIB)
    with pytest.raises(BudgetError, match="at least") as caught, budget:
        result = per_sample_norms(model, x)
    least_budget_bytes = caught.value.least_budget_bytes
    del caught  # its frames hold tensors of the transform
    gc.collect()
    assert result is None
    assert least_budget_bytes > 8 * MIB
    assert budget.summary().peak_bytes <= 4 * MIB
    with MemoryBudget(least_budget_bytes + MIB // 4) as budget:
        per_sample_norms(model, x)
    assert "PASSED" not in str(budget.summary())


def test_an_error_after_a_shortage_is_the_budgets() -> None:
    """What fails because nothing is computed any more is told as the impossible budget that it is."""

    def choose(row: torch.Tensor) -> torch.Tensor:
        total = (row[:, None] * row).exp().sum()
        raise KeyError(str(total.shape))

    with pytest.raises(BudgetError), MemoryBudget(MIB // 2):
        vmap(grad(choose))(torch.ones(64, 128))
    gc.collect()  # the error's frames hold tensors of the transform


def test_nothing_is_left_of_a_transform() -> None:
    """When its results are gone, the scope counts what it counted before."""
    model, x = model_and_data()
    with MemoryBudget("1GiB"):
        session = running_session()
        per_sample_norms(model, x)
        before_bytes = session.ledger.usage.live_bytes
        for _ in range(3):
            per_sample_norms(model, x)
        assert session.ledger.usage.live_bytes == before_bytes
        session.ledger.usage.ask_counter()
        assert session.ledger.usage.total_bytes == before_bytes


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_saved_tensors_from_outside_come_back_inside(decisions: str) -> None:
    """Rows of a Jacobian by `vmap` over `autograd.grad` unpack a graph that was made outside of it."""

    def rows(scope: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
        model, x = model_and_data()
        x.requires_grad_()
        with scope:
            out = (model(x) * 2).sin().exp().sum(0)
            jacobian = vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(torch.eye(128)[:8])
            out.square().sum().backward()
        assert x.grad is not None
        return [jacobian, x.grad]

    config = Config(decisions=decisions, tier="memory")
    plain, ours = rows(contextlib.nullcontext()), rows(MemoryBudget("1TiB", config))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_backward_through_transforms(decisions: str) -> None:
    """Ordinary autograd differentiates what transforms gave, and a custom function inside them keeps its rule."""

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            del output
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad_output

    def curvature(scope: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(12, requires_grad=True), torch.randn(12, 12)
        with scope:
            h = jacrev(jacrev(lambda z: (Cube.apply(w @ z) * z.sin()).sum()))((x * 2).tanh())  # pyright: ignore[reportArgumentType]
            h.square().sum().backward()
        assert x.grad is not None
        return [h, x.grad]

    config = Config(decisions=decisions, tier="memory")
    plain, ours = curvature(contextlib.nullcontext()), curvature(MemoryBudget("1TiB", config))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_trace_of_a_step_with_a_transform_is_whole() -> None:
    """Its ops are in the trace, and the trace passes the validator."""
    with MemoryBudget("1GiB") as budget:
        for _ in range(2):
            train()
    trace = budget.trace()
    validate(trace)
    assert [op.name for op in trace.ops].count("aten.sin.default") == 2
