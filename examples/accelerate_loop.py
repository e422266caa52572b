"""A training loop with Accelerate inside a memory budget. It also runs under `accelerate launch`.

python examples/accelerate_loop.py                        # inside 10 MiB
python examples/accelerate_loop.py --memory-budget none   # plain: the same losses, in 16 MiB
"""

import argparse
import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchdelta import MemoryBudget


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="10MiB", help="such as 10MiB or 50%%; none trains without a budget")
    budget = parser.parse_args().memory_budget

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(4096, 128)), batch_size=512)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with contextlib.nullcontext() if budget == "none" else MemoryBudget(budget) as running:
        for step, (inputs,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = (model(inputs) - inputs.roll(1, dims=-1)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print("loss", step, repr(loss.item()))
    if running is not None:
        accelerator.print(running.summary())


if __name__ == "__main__":
    main()
