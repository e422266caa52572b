"""FLOPs of convolutions: grouped ones cost what their groups cost alone, and all what counting by hand gives."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from torchdelta.trace.symbolic import trace_step


def flops_by_name(function: Any) -> dict[str, int]:
    """The FLOPs of a traced step's convolutions, forward and backward."""
    found = {"aten.convolution.default": 0, "aten.convolution_backward.default": 0}
    for op in trace_step(function, device="cpu", optimizer="none").ops:
        if op.name in found:
            found[op.name] += op.flops
    return found


def multiply_adds(x: torch.Tensor, layer: Any, output: torch.Tensor) -> int:
    """Multiply-adds of a 1d convolution, counted one by one: padding is counted as torch counts it, as zeros."""
    in_channels, out_channels = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    positions = x.shape[2] if layer.transposed else output.shape[2]
    places = itertools.product(
        range(x.shape[0]),
        range(layer.groups),
        range(in_channels),
        range(out_channels),
        range(layer.kernel_size[0]),
        range(positions),
    )
    return sum(1 for _ in places)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_counting_by_hand(kind, groups):
    """Forward: two FLOPs a multiply-add. Backward: once as many for the input, and once as many for the weight."""

    def function() -> tuple[nn.Module, torch.Tensor]:
        return layer(), torch.randn(2, 6, 9, requires_grad=True)

    def layer() -> Any:
        return kind(6, 12, 3, stride=2, padding=1, groups=groups)

    x = torch.randn(2, 6, 9)
    forward = 2 * multiply_adds(x, layer(), layer()(x))
    assert flops_by_name(function) == {
        "aten.convolution.default": forward,
        "aten.convolution_backward.default": 2 * forward,
    }


class Split(nn.Module):
    """A grouped convolution written as a dense one for each group."""

    def __init__(self, kind: Any, groups: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind(16 // groups, 32 // groups, 3, padding=1) for _ in range(groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cut the channels, convolve, and put together."""
        chunks = x.chunk(len(self.parts), dim=1)
        return torch.cat([part(chunk) for part, chunk in zip(self.parts, chunks, strict=True)], dim=1)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_groups_cost_what_they_cost_alone(kind, groups):
    """One grouped convolution, and the same as dense ones side by side."""
    shape = (2, 16, *[5] * (3 if kind is nn.Conv3d else 2))

    def grouped() -> tuple[nn.Module, torch.Tensor]:
        return kind(16, 32, 3, padding=1, groups=groups), torch.randn(shape, requires_grad=True)

    def split() -> tuple[nn.Module, torch.Tensor]:
        return Split(kind, groups), torch.randn(shape, requires_grad=True)

    assert flops_by_name(grouped) == flops_by_name(split)


def test_backward_of_a_depthwise_convolution_is_twice_its_forward():
    """Without a gradient of the input it is once."""

    def depthwise(requires_grad: bool) -> tuple[nn.Module, torch.Tensor]:
        layer = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
        return layer, torch.randn(8, 32, 14, 14, requires_grad=requires_grad)

    for requires_grad, ratio in ((True, 2), (False, 1)):
        found = flops_by_name(functools.partial(depthwise, requires_grad))
        assert found["aten.convolution.default"] == 2 * 8 * 32 * 14 * 14 * 9
        assert found["aten.convolution_backward.default"] == ratio * found["aten.convolution.default"]
