"""A denoising U-Net in the shape that diffusion models have: time embedding, group norm, attention, long skips.

Skips keep early activations until late in the backward, and the gradients that meet there are summed by the engine
itself: a peak of another shape than a stack of blocks has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

NUM_GROUPS = 8


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
