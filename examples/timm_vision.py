"""A vision model of timm, trained inside a memory budget, with an exponential moving average of its weights.

pip install timm
python examples/timm_vision.py                         # inside 60 MiB
python examples/timm_vision.py --memory-budget none    # without: the losses are the same, to the last bit
"""

import argparse
import contextlib

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

from torchdelta import MemoryBudget


def main() -> None:
    """Train a small vision transformer on random pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="60MiB", help="'60MiB', '50%%', bytes, or 'none'")
    limit = parser.parse_args().memory_budget

    torch.manual_seed(0)
    sizes = {"img_size": 96, "patch_size": 8, "embed_dim": 96, "depth": 6, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_rate=0.1, drop_path_rate=0.1, **sizes)
    average = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    loss_of = LabelSmoothingCrossEntropy(0.1)

    with MemoryBudget(limit) if limit != "none" else contextlib.nullcontext() as budget:
        for step in range(4):
            pictures, labels = torch.randn(16, 3, 96, 96), torch.randint(0, 10, (16,))
            loss = loss_of(model(pictures), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            print("loss", step, repr(loss.item()))
    if budget is not None:
        print(budget.summary())


if __name__ == "__main__":
    main()
