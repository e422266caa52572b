"""DistributedDataParallel inside memory budgets: one for each process.

torchrun --nproc-per-node=2 examples/ddp.py          # each process inside 24 MiB
python examples/ddp.py                               # the same: it starts torchrun itself
python examples/ddp.py --memory-budget none          # without: the losses are the same, to the last bit
"""

import argparse
import contextlib
import os
import subprocess
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchdelta import Config, MemoryBudget


def main(limit: str) -> None:
    """Train on random pictures, other ones in each process."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    widths = [3, 32, 32, 64, 64]
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU()) for a, b in pairwise(widths)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())

    config = Config(disk_budget="1GiB")  # of this machine: its processes share it
    with MemoryBudget(limit, config) if limit != "none" else contextlib.nullcontext() as budget:
        for step in range(4):
            pictures, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
            loss = nn.functional.cross_entropy(model(pictures), labels)
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
    parser.add_argument("--memory-budget", default="24MiB", help="'24MiB', '50%%', bytes, or 'none'")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        main(arguments.memory_budget)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*torchrun, *sys.argv], check=False).returncode)
