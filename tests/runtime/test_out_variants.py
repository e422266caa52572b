"""Ops that write into an `out=` buffer need room only for what the buffer grows by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import UNLIMITED
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 512
BUFFER_BYTES = SIDE * SIDE * 4
MARGIN_BYTES = 1 << 17  # an eighth of one buffer: a buffer that is counted twice does not hide in it


def square() -> torch.Tensor:
    """Make a buffer of one MiB."""
    return torch.empty(SIDE, SIDE)


def product(x: torch.Tensor) -> Any:
    """Write a matrix product."""
    return torch.mm(x, x, out=square())


def sum_(x: torch.Tensor) -> Any:
    """Write a sum."""
    return torch.add(x, x, out=square())


def sort(x: torch.Tensor) -> Any:
    """Write two outputs, in a buffer each."""
    return torch.sort(x, out=(square(), torch.empty(SIDE, SIDE, dtype=torch.int64)))


def emptied(x: torch.Tensor) -> Any:
    """Write into a buffer that has no elements, but the memory for all of them."""
    buffer = square().resize_(0)
    return torch.add(x, x, out=buffer)


def emptied_after_growing(x: torch.Tensor) -> Any:
    """Write into a buffer with the memory, after one of the same shape has grown."""
    torch.add(x, x, out=torch.empty(0))
    return emptied(x)


def growing(x: torch.Tensor) -> Any:
    """Write into a buffer that gets its memory from the op."""
    return torch.mm(x, x, out=torch.empty(0))


def part(x: torch.Tensor) -> Any:
    """Write into a part of a larger buffer."""
    return torch.mm(x, x, out=torch.empty(2, SIDE, SIDE)[1])


def wider(x: torch.Tensor) -> Any:
    """Write float32 sums into a buffer of float64."""
    return torch.add(x, x, out=torch.empty(SIDE, SIDE, dtype=torch.float64))


def onto_an_argument(x: torch.Tensor) -> Any:
    """Write over an argument."""
    y = x.clone()
    return torch.mul(y, 2, out=y)


def data_dependent(x: torch.Tensor) -> Any:
    """Write as many rows as the data have, into a buffer that holds them."""
    return torch.nonzero(x[:64] > 0, out=torch.empty(64 * SIDE * 2, dtype=torch.int64).resize_(0))


PROGRAMS = [
    product,
    sum_,
    sort,
    emptied,
    emptied_after_growing,
    growing,
    part,
    wider,
    onto_an_argument,
    data_dependent,
]


def train(program: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Run a program in three training steps, and return all results."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIDE, SIDE))
    results: list[torch.Tensor] = []
    for _ in range(3):
        x = torch.randn(SIDE, SIDE)
        with torch.no_grad():
            filler = torch.zeros(8, SIDE, SIDE)  # the peak of the step is here, and not in its backward
            out = program(x)
            results += [tensor.sum() for tensor in (out if isinstance(out, tuple) else (out,))]
            del out, filler
        (x * weight).sum().backward()
        del x
    assert weight.grad is not None
    return [*results, weight.grad]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_budget_just_above_the_plain_peak_is_enough(program: Callable[[torch.Tensor], Any]) -> None:
    """No `out=` buffer is counted twice, neither at its first use nor when its op has been learned."""
    plain = train(program)
    with MemoryBudget(UNLIMITED) as unlimited:
        train(program)
    with MemoryBudget(unlimited.summary().peak_bytes + MARGIN_BYTES) as budget:
        ours = train(program)
    assert all(map(torch.equal, ours, plain))
    assert budget.summary().swapped_out_bytes == budget.summary().recomputed_bytes == 0


def test_a_growing_buffer_stays_inside_the_budget() -> None:
    """Room is made for what an empty `out` becomes, by sending away what backward needs only later."""
    parameter = torch.nn.Parameter(torch.randn(SIDE, SIDE))

    def step() -> torch.Tensor:
        loss = parameter.sin().sin().sin().sin().sum()
        with torch.no_grad():
            torch.mm(parameter, parameter, out=torch.empty(0))
        loss.backward()
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        return gradient

    plain = step()
    with MemoryBudget(UNLIMITED) as unlimited:
        step()
    budget_bytes = unlimited.summary().peak_bytes - BUFFER_BYTES // 2
    with MemoryBudget(budget_bytes) as budget:
        ours = step()
    assert torch.equal(ours, plain)
    assert budget.summary().peak_bytes <= budget_bytes


def test_the_error_of_a_wrong_out_is_torchs_own() -> None:
    """An `out` of a dtype that the op refuses raises what it raises without a budget."""
    x = torch.ones(SIDE, SIDE)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(x, x, out=torch.empty(SIDE, SIDE, dtype=torch.float64))
    with MemoryBudget(UNLIMITED) as unlimited:
        pass
    live_bytes = unlimited.summary().peak_bytes
    with MemoryBudget(live_bytes + 2 * BUFFER_BYTES + MARGIN_BYTES), pytest.raises(RuntimeError) as ours:
        torch.mm(x, x, out=torch.empty(SIDE, SIDE, dtype=torch.float64))
    assert str(ours.value) == str(plain.value)
