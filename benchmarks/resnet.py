"""Plain ResNets, the shape of torchvision's: in-place ReLU, batch norm, stride on the 3x3 convolution.

The benchmarks need convolutions that allocate inside themselves and activations that are overwritten in place; both
are what makes the memory of a vision model hard to hold. Written here so that no further package is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut (He et al. 2015, version 1.5)."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Return a ResNet-50 with random weights."""
    return build_resnet((3, 4, 6, 3), num_classes)


def resnet101(num_classes: int = 1000) -> nn.Module:
    """Return a ResNet-101 with random weights."""
    return build_resnet((3, 4, 23, 3), num_classes)


def build_resnet(num_blocks_by_stage: tuple[int, int, int, int], num_classes: int) -> nn.Module:
    """Build a ResNet of bottleneck blocks."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    in_channels = 64
    for width, num_blocks, stride in zip((64, 128, 256, 512), num_blocks_by_stage, (1, 2, 2, 2), strict=True):
        for index in range(num_blocks):
            layers.append(Bottleneck(in_channels, width, stride if index == 0 else 1))
            in_channels = width * EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
