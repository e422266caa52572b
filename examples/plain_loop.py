"""A training loop in plain PyTorch inside a memory budget: two lines more than without.

python examples/plain_loop.py                         # inside 64 MiB
python examples/plain_loop.py --memory-budget none    # without: the losses are the same, to the last bit
"""

import argparse
import contextlib

import torch
from torch import nn

from torchdelta import MemoryBudget


class Block(nn.Module):
    """A layer of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main() -> None:
    """Train a small transformer to copy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="64MiB", help="'64MiB', '50%%', bytes, or 'none'")
    limit = parser.parse_args().memory_budget

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), *(Block(128) for _ in range(6)), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    with MemoryBudget(limit) if limit != "none" else contextlib.nullcontext() as budget:
        for step in range(6):
            tokens = torch.randint(0, 256, (8, 128))
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("loss", step, repr(loss.item()))
    if budget is not None:
        print(budget.summary())


if __name__ == "__main__":
    main()
