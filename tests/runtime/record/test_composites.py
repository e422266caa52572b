"""Ops that return a view or a copy, where autograd does not take them apart: a copy gets room like any other op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.programs import UNLIMITED, running
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 64
ROWS = 256


class WithMore(TorchDispatchMode):
    """Runs one more function of its own on what each op returns, as a mode that emulates low precision does."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and the function."""
        del types
        out = func(*args, **(kwargs or {}))
        self._function(out)
        return out


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Copy, as the transposed matrix is not contiguous."""
    return x.t().contiguous()


def reshape(x: torch.Tensor) -> torch.Tensor:
    """Copy for the same reason."""
    return x.t().reshape(-1)


def double(x: torch.Tensor) -> torch.Tensor:
    """Copy to another type."""
    return x.double()


@pytest.mark.parametrize("where", ["inference mode", "a program's mode"])
@pytest.mark.parametrize("copy", [contiguous, reshape, double])
def test_a_copy_is_given_room(copy: Callable[[torch.Tensor], torch.Tensor], where: str) -> None:
    """The bytes of the copy are asked for before it is made."""
    x = torch.randn(WIDTH, WIDTH)
    size_bytes = copy(x).nbytes
    with running() as (_, session):
        asked: list[int] = []
        make = session.room.make

        def spy(wanted_bytes: int, why: str) -> None:
            asked.append(wanted_bytes)
            make(wanted_bytes, why)

        session.room.make = spy  # pyright: ignore[reportAttributeAccessIssue]
        if where == "inference mode":
            with torch.inference_mode():
                copied = copy(x)
        else:
            with WithMore(copy):
                copied = x[:]  # a view, of which the mode makes a copy
    assert torch.equal(copied, copy(x) if where == "inference mode" else x)
    assert size_bytes in asked


def test_what_copies_nothing_is_the_same_tensor() -> None:
    """Without a copy nothing is asked for, and the argument itself comes back."""
    x = torch.randn(WIDTH, WIDTH)
    with running() as (_, session):
        session.room.make = lambda *_: pytest.fail("room was made")  # pyright: ignore[reportAttributeAccessIssue]
        with torch.inference_mode():
            assert x.contiguous() is x
            assert x.float() is x
            assert x.reshape(-1).data_ptr() == x.data_ptr()
            parts = x.chunk(2)
    assert [part.data_ptr() for part in parts] == [x.data_ptr(), x[WIDTH // 2].data_ptr()]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_taken_apart_by_torch() -> None:
    """It has kernels of its own for some of these ops."""
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with running(), torch.inference_mode():
        shaped = nested.reshape(2, -1, 2, 2)
    assert [part.shape for part in shaped.unbind()] == [(2, 2, 2), (3, 2, 2)]


def train(budget: str | int) -> tuple[MemoryBudget, list[torch.Tensor]]:
    """Train with a metric in double precision in the middle of each step, in inference mode."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with MemoryBudget(budget, Config(planner=None, tier="memory")) as scope:
        for _ in range(3):
            y = model(torch.randn(ROWS, WIDTH))
            with torch.inference_mode():
                metric = float(y.double().t().contiguous().mean())
            (y.square().mean() + metric).backward()
            optimizer.step()
            optimizer.zero_grad()
    return scope, [parameter.detach() for parameter in model.parameters()]


def test_a_metric_in_inference_mode_keeps_to_the_budget() -> None:
    """Its copies come when the saved tensors fill the budget: these leave."""
    ample, expected = train(UNLIMITED)
    budget_bytes = int(0.75 * ample.summary().peak_bytes)
    tight, parameters = train(budget_bytes)
    assert tight.summary().peak_bytes <= budget_bytes
    assert all(map(torch.equal, parameters, expected))
