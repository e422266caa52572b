"""A plain GPT-2 in torch alone: machines that measure may have no network and no further packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


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
