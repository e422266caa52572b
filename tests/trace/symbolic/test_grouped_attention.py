"""Attention with fewer heads of keys than of queries, where torch's own counter refuses it (torch 2.11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchdelta.trace.symbolic import costs

aten = torch.ops.aten


def refuse(*_args: Any, **_kwargs: Any) -> int:
    """Fail as torch's counter does."""
    raise AssertionError("query/key/value shapes are incompatible")


@pytest.mark.parametrize(("op", "num_products"), [("", 2), ("_backward", 5)])
def test_it_is_counted_by_its_products(op: str, num_products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product multiplies queries with keys, or scores with values, in every head of the queries."""
    func = getattr(aten, f"_scaled_dot_product_flash_attention{op}").default
    monkeypatch.setitem(costs.flop_registry, func.overloadpacket, refuse)
    with FakeTensorMode():
        query, key = torch.empty(2, 8, 16, 32), torch.empty(2, 2, 16, 32)
    args = (query, query, key, key) if op else (query, key, key)
    expected_flops = num_products * 2 * (2 * 8) * 16 * 16 * 32
    assert costs.flops_of(func, args, {}, None) == (expected_flops, "float32")


def test_other_failures_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose counter fails is an error."""
    monkeypatch.setitem(costs.flop_registry, aten.mm, refuse)
    with pytest.raises(AssertionError):
        costs.flops_of(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}, None)
