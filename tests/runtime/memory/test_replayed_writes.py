"""Replays of ops that write several given tensors, or that ran under other settings: same gradients as plain."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    Scope = contextlib.AbstractContextManager[object]
    Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

N = 4096


def _check(train: Callable[[Scope], list[torch.Tensor | None]]) -> None:
    """Compare the gradients of a step in which everything is dropped with those of a plain one."""
    torch.manual_seed(0)
    plain = train(contextlib.nullcontext())
    torch.manual_seed(0)
    budget = MemoryBudget("1TiB", Config(decisions="recompute", tier="memory"))
    seen = train(budget)
    assert budget.summary().num_recomputed_ops > 0
    for expected, gradient in zip(plain, seen, strict=True):
        assert expected is not None
        assert gradient is not None
        assert torch.equal(expected, gradient)


def _split(data: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.split_with_sizes_copy(data, [N, N], 0, out=[a, b])


def _unbind(data: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.unbind_copy(data.view(2, N), 0, out=[a, b])


def _foreach(data: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.ops.aten._foreach_add.Scalar_out([data[:N], data[N:]], 2.0, out=[a, b])


def _foreach_in_place(data: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.ops.aten._foreach_mul_.List([a, b], [b, data[:N]])


@pytest.mark.parametrize("write", [_split, _unbind, _foreach, _foreach_in_place])
def test_an_op_writes_a_list_of_tensors_that_ops_have_made(write: Write) -> None:
    """The replay writes copies of both."""

    def train(scope: Scope) -> list[torch.Tensor | None]:
        data = torch.randn(2 * N)
        weights = [torch.randn(N, requires_grad=True) for _ in range(2)]
        with scope:
            a, b = data[:N] * 3, data[N:] * 5
            before = (a * 2) * weights[0]  # the replay of this product reads the old content
            write(data, a, b)
            result = (a * weights[0] + b * weights[1] + before).sin()
            del a, b, before
            result.sum().backward()
        return [weight.grad for weight in weights]

    _check(train)


def test_an_input_shares_its_memory_with_the_second_tensor_that_is_written() -> None:
    """The copies must not be exchanged: arguments are rebuilt in another order than outputs are numbered."""

    def train(scope: Scope) -> list[torch.Tensor | None]:
        data = torch.randn(2, 2, N)
        weights = [torch.randn(2 * N, requires_grad=True) for _ in range(2)]
        with scope:
            first, second = data[0] * 3, data[1] * 5
            torch.aminmax(first[0].view(1, N), dim=0, out=(second[1], first[1]))
            result = (first.view(-1) * weights[0] + second.view(-1) * weights[1]).sin()
            del first, second
            result.sum().backward()
        return [weight.grad for weight in weights]

    _check(train)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_convolutions_that_ran_without_nnpack() -> None:
    """The backward runs with it, and the replay without."""

    def train(scope: Scope) -> list[torch.Tensor | None]:
        pictures, weight = torch.randn(16, 8, 16, 16), torch.randn(8, 8, 3, 3, requires_grad=True)
        with scope, torch.backends.mkldnn.flags(enabled=False):
            with torch.backends.nnpack.flags(enabled=False):
                result = functional.conv2d(pictures, weight, padding=1).sin()
            result.sum().backward()
        return [weight.grad]

    _check(train)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_an_op_that_has_only_warned_is_replayed() -> None:
    """Whether such ops only warn is a setting of the forward, too."""

    def train(scope: Scope) -> list[torch.Tensor | None]:
        x = torch.randn(4, 4, 16, 16, requires_grad=True)
        with scope:
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                pooled, indices = functional.max_pool2d(x * 2, 2, return_indices=True)
                loss = functional.max_unpool2d(pooled, indices, 2).sin().sum()
            finally:
                torch.use_deterministic_algorithms(False)
            loss.backward()
        return [x.grad]

    _check(train)
