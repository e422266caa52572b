"""Complex tensors: kernels that make conjugate views inside, and views that are lazily conjugate or negative."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, state_of
from tests.torch_suite.budgets import assert_same
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable


def leaf(*shape: int) -> torch.Tensor:
    """Draw a complex leaf that wants a gradient."""
    return torch.randn(*(shape or (24, 24)), dtype=torch.complex64, requires_grad=True)


@pytest.mark.parametrize(
    "solve",
    [
        torch.pinverse,
        torch.linalg.pinv,
        lambda x: torch.linalg.pinv(x @ x.mH, hermitian=True),
    ],
    ids=["pinverse", "pinv", "hermitian"],
)
def test_kernels_that_conjugate_inside(solve: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Torch runs these wrongly under any dispatch mode: conjugate views that they make stay unresolved there."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = (x * 2).sin()
            (solve(hidden) * hidden.exp()).abs().sum().backward()
            with torch.no_grad():
                without_gradient = torch.pinverse(x)
        return {"grad": x.grad, "without gradient": without_gradient}

    assert_same(step)


def test_least_squares_of_complex_numbers() -> None:
    """Least squares by LAPACK do not always equal themselves bit for bit, so their gradients are compared closely."""
    gradients: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(12, 12, dtype=torch.complex128, generator=generator) + 5 * torch.eye(12)
    for scope in (contextlib.nullcontext(), MemoryBudget("8GiB"), MemoryBudget("8GiB", Config(decisions="recompute"))):
        x = matrix.clone().requires_grad_()
        with scope:
            torch.linalg.lstsq(x * 2, (x.mT + 1).sin()).solution.abs().sum().backward()
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_lazy_conjugates_and_negatives_that_are_saved() -> None:
    """Products, sums and in-place writes of lazily conjugate and negative views."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = (x * 2).sin()
            products = hidden.conj() * hidden.mH @ hidden.conj().imag.to(torch.complex64)
            part = hidden.clone()
            part.conj().imag.mul_(3)
            part.real.add_(1)
            (products.sum() + part.exp().sum() + torch.linalg.vecdot(hidden, part).sum()).abs().backward()
        return {"grad": x.grad}

    assert_same(step)


def test_complex_layers() -> None:
    """Complex linear and convolution layers, a Fourier transform and a decomposition, trained for two steps."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(24, 24, dtype=torch.complex64), nn.Linear(24, 24, dtype=torch.complex64))
        conv = nn.Conv1d(4, 4, 3, dtype=torch.complex64)
        x = leaf(8, 24)
        with scope():
            for _ in range(2):
                hidden = torch.fft.fft(model[0](x)).tanh()
                hidden = torch.fft.ifftshift(model[1](hidden.conj()))
                spread = conv(hidden.reshape(2, 4, 24)).abs().sum()
                values = torch.linalg.svdvals(hidden).sum()
                (spread + values + torch.view_as_real(hidden).pow(3).sum()).backward()
        return state_of(model, conv, x=x.grad)

    assert_same(step)


def test_real_and_complex_together() -> None:
    """Gradients of real inputs of complex ops, polar forms and products of a real with a complex tensor."""

    def step(scope: Scope) -> dict[str, Any]:
        radius, angle = torch.rand(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
        with scope():
            z = torch.polar(radius * 2, angle.sin())
            w = torch.complex(radius.exp(), angle)
            (z * w.conj() * radius).sgn().sum().abs().backward(retain_graph=True)
            torch.view_as_real(z.pow(2) / (w + 2)).sum().backward()
        return {"radius": radius.grad, "angle": angle.grad}

    assert_same(step)
