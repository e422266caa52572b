"""FSDP2 (`fully_shard`) inside memory budgets: one for each process.

torchrun --nproc-per-node=2 examples/fsdp2.py        # each process inside 28 MiB
python examples/fsdp2.py                             # the same: it starts torchrun itself
python examples/fsdp2.py --memory-budget none        # without: the losses are the same, to the last bit
"""

import argparse
import contextlib
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchdelta import MemoryBudget


class Block(nn.Module):
    """The feed-forward part of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return x + self.mlp(self.norm(x))


def main(limit: str) -> None:
    """Train a sharded model on random numbers, other ones in each process."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(6)), nn.Linear(128, 16))
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())

    with MemoryBudget(limit) if limit != "none" else contextlib.nullcontext() as budget:
        for step in range(4):
            loss = model(torch.randn(1024, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print("loss", step, repr(mean.item()), flush=True)
    if budget is not None and dist.get_rank() == 0:
        print(budget.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="28MiB", help="'28MiB', '50%%', bytes, or 'none'")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        main(arguments.memory_budget)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*torchrun, *sys.argv], check=False).returncode)
