"""Writes that are no op, into what a replay would make or read: the bits are plain's all the same."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.same_bits.judge import DEVICE, Scope, assert_same_bits
from torchdelta import Config, MemoryBudget
from torchdelta.native.weak_storage import weak_storage_type

if TYPE_CHECKING:
    from pathlib import Path

NUM = 8192


@pytest.fixture
def _weak_storages() -> None:
    """Skip without the native module: memory outside of torch is not noticed then."""
    if weak_storage_type() is None:
        pytest.skip("needs the native module")


class _Extension(torch.autograd.Function):
    """Has code outside of torch fill a tensor, as C++ extensions do that get their output from Python."""

    make: Any = torch.zeros_like

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        out = _Extension.make(x.detach())
        np.copyto(out.numpy(), x.detach().numpy() * 2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return grads[0] * 2


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda x: x.new_full(x.shape, 3.0),
        lambda x: torch.empty_like(x).zero_(),
    ],
    ids=["zeros_like", "ones_like", "new_full", "zero_"],
)
def test_an_extension_writes_a_constant(make: Any) -> None:
    """In the forward of a custom Function a constant is not recomputed: it is the output of such code."""

    def step(scope: Scope) -> dict[str, Any]:
        x, v = torch.arange(1.0, NUM + 1), torch.ones(NUM, requires_grad=True)
        w = torch.ones(NUM, requires_grad=True)
        with scope():
            y = _Extension.apply((x * v).tanh())
            loss = (y * w).sum()
            del y
            loss.backward()
        return {"v": v.grad, "w": w.grad}

    _Extension.make = staticmethod(make)
    assert_same_bits(step)


@pytest.mark.parametrize(
    "see",
    [torch.from_numpy, torch.as_tensor, torch.from_dlpack, lambda array: torch.frombuffer(array, dtype=torch.uint8)],
    ids=["from_numpy", "as_tensor", "from_dlpack", "frombuffer"],
)
@pytest.mark.usefixtures("_weak_storages")
def test_an_array_that_is_filled_anew(see: Any) -> None:
    """What an op made from the memory of an array is not made again from what the array holds later."""

    def step(scope: Scope) -> dict[str, Any]:
        array, w = np.zeros(NUM, np.uint8), torch.ones(NUM, requires_grad=True)
        with scope():
            losses = []
            for index in range(3):
                array[:] = (np.arange(NUM) + 50 * index) % 256
                scaled = see(array).float() / 255
                losses.append((scaled.sin() * w).sum())
                del scaled
            torch.stack(losses).sum().backward()
        return {"w": w.grad}

    assert_same_bits(step)


@pytest.mark.skipif(DEVICE != "cpu", reason="host tensors are no part of the budget there")
def test_frozen_parameters_in_the_memory_of_an_array() -> None:
    """They may be in a mapped file: what is made from them is still recomputed."""
    weight = torch.nn.Parameter(torch.from_numpy(np.linspace(-1, 1, 64 * 64, dtype=np.float32)).view(64, 64))
    weight.requires_grad_(False)
    x = torch.randn(64, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")) as budget:
        y = torch.nn.functional.linear(x, weight)
        loss = y.sin().sum()  # the sine saves the product
        del y
        loss.backward()
    assert budget.summary().num_recomputed_ops == 1


@pytest.mark.parametrize("detaches", [True, False], ids=["data", "itself"])
def test_the_forward_reads_a_gradient_that_the_backward_adds_to(detaches: bool) -> None:
    """The engine adds to `.grad` where no op is seen; a replay later in that backward reads what was there before."""

    def step(scope: Scope) -> dict[str, Any]:
        p, q = torch.randn(NUM, requires_grad=True), torch.ones(NUM, requires_grad=True)
        p.grad = torch.randn(NUM)
        with scope():
            read = torch.sigmoid(p.grad.data if detaches else p.grad)
            loss = (read * q).sum()
            del read
            loss = loss + (p * 2).sum()  # later nodes run first: the gradient is added before `read` is unpacked
            loss.backward()
        return {"p": p.grad, "q": q.grad}

    assert_same_bits(step)


@pytest.mark.parametrize("detaches", [True, False], ids=["data", "itself"])
@pytest.mark.parametrize("start", [torch.Tensor.backward, torch.autograd.backward], ids=["method", "function"])
def test_the_forward_reads_a_gradient_that_a_backward_in_a_hook_adds_to(start: Any, *, detaches: bool) -> None:
    """A replay that comes after the hook reads what was there before."""

    def step(scope: Scope) -> dict[str, Any]:
        p, q = torch.randn(NUM, requires_grad=True), torch.ones(NUM, requires_grad=True)
        p.grad = torch.randn(NUM)
        with scope():
            other = (p * p).sum()
            read = torch.sigmoid(p.grad.data if detaches else p.grad)
            product = read * q
            del read
            product.register_hook(lambda _: start(other))
            product.sum().backward()
        return {"p": p.grad, "q": q.grad}

    assert_same_bits(step)


@pytest.mark.parametrize("way", ["penalty", "double backward"])
def test_a_gradient_that_the_forward_saves(way: str) -> None:
    """It is saved before the backward adds to it, and its parameter is reached through two nodes."""

    def step(scope: Scope) -> dict[str, Any]:
        p = torch.randn(NUM, requires_grad=True)
        with scope():
            if way == "penalty":
                p.grad = torch.randn(NUM)
                (p * p).sin().sum().add((p * p.grad.detach()).sum()).backward()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of the cycle, which ends with the step
                    (p * p * p).sin().sum().backward(create_graph=True)
                assert p.grad is not None
                p.grad.pow(2).sum().backward()
        gradient, p.grad = p.grad, None
        return {"p": gradient.detach() if gradient is not None else None}

    assert_same_bits(step)


@pytest.mark.usefixtures("_weak_storages")
def test_constants_in_the_memory_of_an_array() -> None:
    """An op has filled the memory, and then the program writes it through the array."""

    def step(scope: Scope) -> dict[str, Any]:
        array, w = np.ones(NUM, np.float32), torch.ones(NUM, requires_grad=True)
        with scope():
            mask = torch.from_numpy(array).zero_()
            array[::2] = 1
            read = (mask * w).sin() * mask
            del mask
            read.sum().backward()
        return {"w": w.grad}

    assert_same_bits(step)


def test_tensors_of_a_file_are_read_by_replays(tmp_path: Path) -> None:
    """Their memory is torch's own, or a mapped file: what is made from them is recomputed."""
    torch.save(torch.randn(64, 64), tmp_path / "data.pt")
    for maps in (False, True):
        data, x = torch.load(tmp_path / "data.pt", mmap=maps), torch.randn(64, 64, requires_grad=True)
        with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")) as budget:
            y = x @ data
            loss = y.sin().sum()
            del y
            loss.backward()
        assert budget.summary().num_recomputed_ops == 1
