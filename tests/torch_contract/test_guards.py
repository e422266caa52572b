"""The contract with torch: guards: what runs unseen by modes, autograd and autocast.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_contract.names import Names
from torchdelta._torch import device as torch_device
from torchdelta._torch.engine import set_grad_enabled
from torchdelta._torch.modes import AUTOCAST_KEYS, BelowAutograd, ExcludeKeys, NoDispatch, NoFunction, Quietly


def test_no_dispatch() -> None:
    """No Python dispatch mode sees what runs inside."""
    with Names() as names:
        with NoDispatch():
            x = torch.zeros(2) + 1
        seen_inside = list(names.seen)
        x = x * 2
    assert seen_inside == []
    assert names.seen == ["aten.mul.Tensor"]


def test_no_function() -> None:
    """No function mode and no `__torch_function__` sees what runs inside."""

    class Refuses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with Refuses(), NoFunction():
        assert (torch.zeros(2) + 1).sum().item() == 2


def test_below_autograd() -> None:
    """No graph is made inside, whatever the grad mode says."""
    x = torch.ones(2, requires_grad=True)
    with BelowAutograd(), torch.enable_grad():
        y = torch.ops.aten.mul.Tensor(x, 2)
    assert y.grad_fn is None
    assert not y.requires_grad


def test_autocast_keys() -> None:
    """Excluded, an op runs in the dtypes of its arguments also where autocast is on."""
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.bfloat16
        with ExcludeKeys(AUTOCAST_KEYS):
            assert torch.mm(a, a).dtype is torch.float32


def test_quietly() -> None:
    """All of it together.

    Unseen, without a graph, uncast, and everything as before afterwards, after an exception too.
    """
    x = torch.randn(4, 4, requires_grad=True)
    with Names() as names, torch.autocast("cpu", torch.bfloat16):
        with Quietly():
            y = torch.mm(x, x)
            assert not torch.is_grad_enabled()
        with pytest.raises(KeyError), Quietly():
            raise KeyError
        assert torch.is_grad_enabled()
        assert names.seen == []
    assert y.dtype is torch.float32
    assert not y.requires_grad
    with torch.no_grad():
        with Quietly():
            pass
        assert not torch.is_grad_enabled()


def test_set_grad_enabled() -> None:
    """It sets the mode that kernels read."""
    try:
        set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_numeric_environment() -> None:
    """What kernels read is read, and set again."""
    before = torch_device.numeric_environment()
    num_threads, _, *others = before[3:]
    changed = (torch.float64, tuple(not each for each in before[1]), (True, True), num_threads, "medium", *others)
    try:
        torch_device.set_numeric_environment(changed)
        assert torch.get_default_dtype() is torch.float64
        assert changed[1] == (
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
            torch._C._get_nnpack_enabled(),
        )
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch_device.numeric_environment() == changed
    finally:
        torch_device.set_numeric_environment(before)
    assert torch_device.numeric_environment() == before


def test_flushes_denormals() -> None:
    """What torch sets for its kernels holds for Python's floats, by which it is told; it is set again like the rest."""
    before = torch_device.numeric_environment()
    least_normal = torch.tensor([torch.finfo(torch.float32).tiny] * 64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        assert torch_device.flushes_denormals()
        assert not (least_normal * 0.5).any()
        assert torch_device.numeric_environment() != before
        torch_device.set_numeric_environment(before)
        assert not torch_device.flushes_denormals()
        assert (least_normal * 0.5).all()
    finally:
        torch.set_flush_denormal(False)
    assert torch_device.numeric_environment() == before
