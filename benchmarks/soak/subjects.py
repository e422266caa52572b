"""The models of the soak: small, and with everything that makes a step hard to repeat: dropout, statistics, skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.models import LEARNING_RATE, seed_everything
from benchmarks.unet import UNet

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 2000
LENGTH_UNIT = 32
# A batch whose largest single tensor is more than any budget here.
TOO_LARGE = (256, 4)
LARGEST = (8, 4)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its optimizer, the modules in which faults happen, and how a batch becomes a loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: tuple[nn.Module, ...]
    loss: Callable[[int, int], Tensor]


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


def build(name: str, seed: int) -> Subject:
    """Build a subject from fixed seeds."""
    seed_everything(seed)
    return {"gpt": _gpt, "unet": _unet, "conv": _conv}[name]()


def _gpt() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=4 * LENGTH_UNIT,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()

    def loss(batch_size: int, length: int) -> Tensor:
        tokens = torch.randint(VOCABULARY, (batch_size, length * LENGTH_UNIT))
        return model(input_ids=tokens, labels=tokens).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 10)
    return Subject(model=model, optimizer=optimizer, blocks=tuple(model.transformer.h), loss=loss)


def _unet() -> Subject:
    model = UNet(width=16, multiples=(1, 2), num_blocks=1).train()

    def loss(batch_size: int, length: int) -> Tensor:
        size = 16 + 4 * length  # attention is square in the number of pixels
        noisy, noise = torch.randn(2, batch_size, 3, size, size)
        return nn.functional.mse_loss(model(noisy, torch.randint(1000, (batch_size,))), noise)

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    return Subject(model=model, optimizer=optimizer, blocks=(*model.down, *model.middle, *model.up), loss=loss)


def _conv() -> Subject:
    model = ConvNet().train()

    def loss(batch_size: int, length: int) -> Tensor:
        size = 16 + 8 * length
        pictures, labels = torch.randn(batch_size, 3, size, size), torch.randint(100, (batch_size,))
        return nn.functional.cross_entropy(model(pictures), labels)

    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE / 10, foreach=True)
    return Subject(model=model, optimizer=optimizer, blocks=tuple(model.blocks), loss=loss)
