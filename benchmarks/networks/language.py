"""Networks over sequences, in torch alone: machines that measure may have no network and no further packages.

Each takes a batch and returns its loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and perceptron, each behind a norm and around a residual (Radford et al. 2019)."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shape (batch, length, width)."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """Embeddings, blocks and a head that shares the embedding's weight."""

    def __init__(
        self, num_layers: int, width: int, num_heads: int, vocabulary: int, length: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it; tokens have shape (batch, length)."""
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Encoder(nn.Module):
    """Encoder blocks of torch over features, with a linear head."""

    def __init__(self, num_layers: int, width: int, num_heads: int, hidden_width: int, num_classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, num_heads, hidden_width, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy; features have shape (batch, length, width), labels (batch, length)."""
        return nn.functional.cross_entropy(self.head(self.blocks(features)).flatten(0, 1), labels.flatten())


class Cells(nn.Module):
    """A recurrent cell of torch, unrolled op by op, with a linear head at every step."""

    def __init__(self, kind: type[nn.Module], num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.cell, self.head = kind(32, 64), nn.Linear(64, 20)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of all outputs; x has shape (batch, steps, 32), and its steps come round again."""
        state: Any = None
        outputs: list[Tensor] = []
        for step in range(self.num_steps):
            state = self.cell(x[:, step % x.shape[1]], state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs).square().mean()


class Recurrence(nn.Module):
    """A gated cell with layer norm, unrolled op by op, with a loss at every step."""

    def __init__(self, num_steps: int, width: int = 48) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.inward, self.across = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.norm, self.dropout, self.out = nn.LayerNorm(4 * width), nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean loss over all steps."""
        hidden = cell = torch.zeros_like(x[:, 0])
        losses: list[Tensor] = []
        for step in range(self.num_steps):
            gates = self.norm(self.inward(x[:, step % x.shape[1]]) + self.across(hidden))
            first, second, third, fourth = gates.chunk(4, 1)
            cell = torch.sigmoid(first) * cell + torch.sigmoid(second) * torch.tanh(third)
            hidden = torch.sigmoid(fourth) * torch.tanh(cell)
            losses.append(self.out(self.dropout(hidden)).square().mean())
        return torch.stack(losses).mean()
