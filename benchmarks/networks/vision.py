"""Networks over pictures, in torch alone, and the modules that make their losses.

ResNets and U-Nets need convolutions that allocate inside themselves, activations that are overwritten in place, and
skips that keep early activations until late in the backward: what makes the memory of a vision model hard to hold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

EXPANSION = 4
NUM_GROUPS = 8
NUM_CLASSES = 1000


class Classifier(nn.Module):
    """A network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy; images have shape (batch, 3, height, width), labels (batch)."""
        return nn.functional.cross_entropy(self.network(images), labels)


class Denoiser(nn.Module):
    """A network that predicts the noise in a picture, and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error; pictures have shape (batch, 3, height, width), times (batch)."""
        return nn.functional.mse_loss(self.network(noisy, times), noise)


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


def build_resnet(
    num_blocks_by_stage: tuple[int, int, int, int] = (3, 4, 6, 3), num_classes: int = NUM_CLASSES
) -> nn.Module:
    """Build a ResNet of bottleneck blocks, by default a ResNet-50."""
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


def build_vgg16() -> nn.Module:
    """VGG-16 without batch norm (Simonyan and Zisserman 2014, configuration D)."""
    layers: list[nn.Module] = []
    in_channels = 3
    for width, num_layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(num_layers):
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            in_channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, NUM_CLASSES),
    ]
    return nn.Sequential(*layers)


def build_alexnet() -> nn.Module:
    """AlexNet in the single-tower form of torchvision (Krizhevsky 2014)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, NUM_CLASSES),
    )


class ConvNet(nn.Module):
    """Convolutions with batch norm, in-place activations and skips."""

    def __init__(self, width: int = 24, depth: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.Dropout2d(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of pictures."""
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = torch.relu_(hidden + block(hidden))
        return self.head(hidden.mean((2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions around an added time embedding (Ho et al. 2020)."""

    def __init__(self, in_channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(NUM_GROUPS, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.norm2 = nn.GroupNorm(NUM_GROUPS, out_channels)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the block's output for pictures and their embedded times."""
        hidden = self.conv1(nn.functional.silu(self.norm1(x)))
        hidden = hidden + self.time(nn.functional.silu(time))[:, :, None, None]
        hidden = self.conv2(self.dropout(nn.functional.silu(self.norm2(hidden))))
        return hidden + self.shortcut(x)


class PictureAttention(nn.Module):
    """Self-attention over the pixels of a small picture."""

    def __init__(self, channels: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(NUM_GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pictures with what their pixels took from each other added."""
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.num_heads, channels // self.num_heads, height * width)
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(-1, -2).reshape(batch, channels, height, width))


class UNet(nn.Module):
    """Predicts the noise in a picture: a way down, a middle with attention, and a way up that takes the skips."""

    def __init__(self, width: int = 32, multiples: tuple[int, ...] = (1, 2, 4), num_blocks: int = 2) -> None:
        super().__init__()
        self.width = width
        time_width = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        channels, skips = width, [width]
        self.down = nn.ModuleList()
        for level, multiple in enumerate(multiples):
            for _ in range(num_blocks):
                self.down.append(ResidualBlock(channels, width * multiple, time_width))
                channels = width * multiple
                skips.append(channels)
            if level < len(multiples) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skips.append(channels)
        self.middle = nn.ModuleList([ResidualBlock(channels, channels, time_width), PictureAttention(channels)])
        self.up = nn.ModuleList()
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(num_blocks + 1):
                self.up.append(ResidualBlock(channels + skips.pop(), width * multiple, time_width))
                channels = width * multiple
            if level > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, padding=1)))
        self.head = nn.Sequential(nn.GroupNorm(NUM_GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def embed_time(self, times: Tensor) -> Tensor:
        """Return sinusoids of the diffusion times, shape (batch, width)."""
        frequencies = torch.exp(-math.log(10_000) * torch.arange(self.width // 2) / (self.width // 2))
        angles = times[:, None].float() * frequencies.to(times.device)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the predicted noise of pictures (batch, 3, height, width) at their times (batch)."""
        time = self.time(self.embed_time(times))
        hidden = self.stem(noisy)
        skips = [hidden]
        for module in self.down:
            hidden = module(hidden, time) if isinstance(module, ResidualBlock) else module(hidden)
            skips.append(hidden)
        for module in self.middle:
            hidden = module(hidden, time) if isinstance(module, ResidualBlock) else module(hidden)
        for module in self.up:
            if isinstance(module, ResidualBlock):
                hidden = module(torch.cat([hidden, skips.pop()], dim=1), time)
            else:
                hidden = module(hidden)
        return self.head(hidden)
