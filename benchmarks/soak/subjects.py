"""The models of the soak: small, and with everything that makes a step hard to repeat: dropout, statistics, skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.models import LEARNING_RATE, Recipe, classifier, denoiser, gpt2, loss_of, seed_everything
from benchmarks.networks.vision import ConvNet

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

# A batch whose largest single tensor is more than any budget here.
TOO_LARGE = (256, 4)
LARGEST = (8, 4)

# How to build it, the size of a sample by its length, and the optimizer. The U-Net's attention is square in the pixels.
_SUBJECTS: dict[str, tuple[Recipe, Callable[[int], int], Callable[..., torch.optim.Optimizer]]] = {
    "gpt": (
        gpt2(size=128, vocab_size=2000, n_layer=4, n_embd=128, n_head=4),
        lambda length: 32 * length,
        lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE / 10),
    ),
    "unet": (
        denoiser(batch_size=8, size=32, width=16, multiples=(1, 2), num_blocks=1),
        lambda length: 16 + 4 * length,
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
    ),
    "conv": (
        classifier(ConvNet, batch_size=8, size=48, num_classes=100),
        lambda length: 16 + 8 * length,
        lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE / 10, foreach=True),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its optimizer, the modules in which faults happen, and how a drawn batch becomes a loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: tuple[nn.Module, ...]
    loss: Callable[[int, int], Tensor]


def build(name: str, seed: int) -> Subject:
    """Build a subject from fixed seeds."""
    seed_everything(seed)
    recipe, size_of, new_optimizer = _SUBJECTS[name]
    model = recipe.network().train()
    return Subject(
        model=model,
        optimizer=new_optimizer(model.parameters()),
        blocks=_blocks(name, model),
        loss=lambda batch_size, length: loss_of(model, recipe.draw(batch_size, size_of(length))),
    )


def _blocks(name: str, model: nn.Module) -> tuple[nn.Module, ...]:
    if name == "gpt":
        return tuple(model.transformer.h)
    network = model.network
    return (*network.down, *network.middle, *network.up) if name == "unet" else tuple(network.blocks)
