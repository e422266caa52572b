"""In-place ops on sparse tensors write the tensors that these consist of."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

N = 4096

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)"),
]


def _coo(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(N)[None], values, (N,), is_coalesced=True)


def _csr(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.arange(0, N + 1, 64), torch.arange(64).repeat(N // 64), values, (N // 64, 64))


def _train(
    scope: contextlib.AbstractContextManager[object],
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_computed: bool,
    in_backward: bool,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight, data = torch.randn(N, requires_grad=True), torch.randn(N)
    with scope:
        values = data * 1.5 if is_computed else data
        sparse = make(values)
        total = weight * 1.1 + values * 2  # the sum is dropped; its replay reads the values
        result = total.sin() * 3
        if in_backward:
            result.register_hook(lambda _gradient: (sparse.neg_(), None)[1])
        else:
            sparse.neg_()
        del total
        result.sum().backward()
    assert weight.grad is not None
    return [weight.grad, values]


@pytest.mark.parametrize("make", [_coo, _csr])
@pytest.mark.parametrize("is_computed", [False, True], ids=["data", "computed"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "hook"])
def test_a_replay_reads_the_values_from_before(
    make: Callable[[torch.Tensor], torch.Tensor], *, is_computed: bool, in_backward: bool
) -> None:
    """The sparse tensor itself has no storage."""
    plain = _train(contextlib.nullcontext(), make, is_computed=is_computed, in_backward=in_backward)
    budget = MemoryBudget("1TiB", Config(decisions="recompute", tier="memory"))
    seen = _train(budget, make, is_computed=is_computed, in_backward=in_backward)
    assert budget.summary().num_recomputed_ops > 0
    assert all(map(torch.equal, plain, seen))


class _Sparse(torch.nn.Module):
    """Multiplies by a sparse matrix over a parameter, after many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.randn(128 * 128) * 0.05)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(8))
        self.register_buffer("indices", torch.ones(128, 128).nonzero().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Make the sparse matrix first: the parameter is not used by its own name later."""
        matrix = torch.sparse_coo_tensor(self.indices, self.values, (128, 128), is_coalesced=True)
        for layer in self.layers:
            x = layer(x).tanh()
        return torch.sparse.mm(matrix, x)


def _fit(scope: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with scope:
        for _ in range(3):
            model(torch.randn(128, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_sparse_tensor_over_a_parameter_that_may_leave() -> None:
    """What it reads is brought back first."""
    plain = _fit(contextlib.nullcontext())
    generous = MemoryBudget("1TiB", Config(decision_class="all", tier="memory", planner=None))
    _fit(generous)
    budget = MemoryBudget(
        int(generous.summary().peak_bytes * 0.65), Config(decision_class="all", tier="memory", planner=None)
    )
    seen = _fit(budget)
    assert budget.summary().swapped_out_bytes > 0
    assert all(map(torch.equal, plain, seen))
