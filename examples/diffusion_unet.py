"""A diffusion model's U-Net, trained inside a memory budget.

pip install diffusers
python examples/diffusion_unet.py                         # inside 50 MiB
python examples/diffusion_unet.py --memory-budget none    # without: the losses are the same, to the last bit
"""

import argparse
import contextlib

import torch
from diffusers import DDPMScheduler, UNet2DModel

from torchdelta import MemoryBudget


def main() -> None:
    """Train a small U-Net to predict the noise in random pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="50MiB", help="'50MiB', '50%%', bytes, or 'none'")
    limit = parser.parse_args().memory_budget

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=16,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with MemoryBudget(limit) if limit != "none" else contextlib.nullcontext() as budget:
        for step in range(4):
            pictures = torch.randn(8, 3, 32, 32)
            noise = torch.randn_like(pictures)
            times = torch.randint(0, 1000, (len(pictures),))
            noisy = noise_scheduler.add_noise(pictures, noise, times)
            loss = torch.nn.functional.mse_loss(model(noisy, times).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("loss", step, repr(loss.item()))
    if budget is not None:
        print(budget.summary())


if __name__ == "__main__":
    main()
