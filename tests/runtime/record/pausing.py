"""A small training whose recording pauses."""

from __future__ import annotations

import gc

import torch
from torch import nn

from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget

CONFIG = Config(tier="memory")
WIDTH = 64


def make_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a net with dropout, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[int]) -> list[str]:
    """Train a step on each batch size. Return the losses, exactly."""
    losses = []
    for batch_size in batches:
        loss = model(torch.randn(batch_size, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def peak_of(batch_size: int) -> int:
    """Return the peak of plain steps with batches of this size."""
    gc.collect()
    with MemoryBudget("1TiB", CONFIG) as budget:
        train(*make_model(), [batch_size] * 2)
    return budget.summary().peak_bytes


def is_recording() -> bool:
    """Return whether the running step is recorded."""
    return not running_session().pause.is_on
