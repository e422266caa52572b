"""Saved tensors in memory that another library has allocated at any address: same gradients as plain."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from typing import Literal

ALIGNMENT_BYTES = 64
ROWS, COLUMNS = 257, 129


def _train(scope: contextlib.AbstractContextManager[object], offset_bytes: int) -> torch.Tensor:
    """Multiply by a matrix at an address of this distance from a multiple of 64."""
    torch.manual_seed(0)
    array = np.empty(ROWS * COLUMNS + 2 * ALIGNMENT_BYTES, dtype=np.float32)
    start = (offset_bytes - array.ctypes.data) % ALIGNMENT_BYTES // array.itemsize
    data = torch.from_numpy(array[start : start + ROWS * COLUMNS]).view(ROWS, COLUMNS)
    data.copy_(torch.randn(ROWS, COLUMNS))
    assert data.data_ptr() % ALIGNMENT_BYTES == offset_bytes
    weight = torch.randn(COLUMNS, 1, requires_grad=True)
    with scope:
        (data @ weight).sin().sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("decisions", ["swap", "recompute"])
@pytest.mark.parametrize("offset_bytes", [0, 4, 8, 12, 16, 32])
def test_it_stays_at_its_address(offset_bytes: int, decisions: Literal["swap", "recompute"]) -> None:
    """MKL adds in another order where memory is aligned otherwise."""
    plain = _train(contextlib.nullcontext(), offset_bytes)
    budget = MemoryBudget("1TiB", Config(decisions=decisions, tier="memory"))
    assert torch.equal(_train(budget, offset_bytes), plain)
    if decisions == "swap":  # the result of the product, and not the matrix
        assert 0 < budget.summary().swapped_out_bytes < ROWS * COLUMNS * 4
