"""The functional, `out=` and in-place variants of torch's operators fit into a budget of what they take plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.same_bits.judge import UNLIMITED, bits_of, seed_everything
from tests.same_bits.op_database import differentiable_operators, full_name
from torchdelta import BudgetError, MemoryBudget
from torchdelta.native.counting import counting_status

# The samples provoke torch's own warnings on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

STRIDE = 13  # every so many operators, for the time that it takes


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the database before the collector is told to leave imports out."""
    differentiable_operators()


def copied(value: Any) -> Any:
    """Copy the tensors in a sample."""
    return tree_map(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value)


def run(op: Any, sample: Any) -> list[Any]:
    """Run the variants of an operator on one sample, one after the other, and return their results."""
    results: list[Any] = []
    with torch.no_grad():
        seed_everything()
        first, args, kwargs = copied((sample.input, sample.args, sample.kwargs))
        functional = op.op(first, *args, **kwargs)
        results.append(bits_of(functional))
        out = tree_map(lambda item: torch.empty_like(item) if isinstance(item, torch.Tensor) else item, functional)
        out = tuple(out) if isinstance(out, tuple) else out
        seed_everything()
        results.append(bits_of(op.op(first, *args, out=out, **kwargs)))
        if op.inplace_variant is not None and not sample.broadcasts_input:
            seed_everything()
            results.append(bits_of(op.inplace_variant(first, *args, **kwargs)))
    return results


def test_the_plain_peak_is_budget_enough() -> None:
    """No variant of any operator asks for more room than it takes, and each has the bits of the plain run."""
    if not counting_status().is_on:
        pytest.skip("without a counter at the allocator the plain peak is not known to the byte")
    refused: dict[str, str] = {}
    num_run = 0
    for op in [op for op in differentiable_operators() if op.supports_out][::STRIDE]:
        sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)))
        try:
            plain = run(op, sample)
        except (RuntimeError, TypeError):
            continue  # this sample has no `out=` variant
        with MemoryBudget(UNLIMITED) as unlimited:
            assert run(op, sample) == plain, full_name(op)
        peak_bytes = unlimited.summary().peak_bytes
        if peak_bytes == 0:
            continue  # a budget of 0 bytes is not allowed
        try:
            with MemoryBudget(peak_bytes):
                assert run(op, sample) == plain, full_name(op)
        except BudgetError as error:
            refused[full_name(op)] = str(error)
        num_run += 1
    assert refused == {}
    assert num_run >= 12
