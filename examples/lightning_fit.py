"""Lightning's Trainer inside a memory budget: one callback more than without.

pip install '.[lightning]'
python examples/lightning_fit.py                         # inside 24 MiB
python examples/lightning_fit.py --memory-budget none    # without: the losses are the same, to the last bit
"""

import argparse
from itertools import pairwise

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchdelta.integrations.lightning import MemoryBudgetCallback


class Classifier(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 32, 64, 64]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU()) for a, b in pairwise(widths)
        ]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        print("loss", batch_idx, repr(loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train on random pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="24MiB", help="'24MiB', '50%%', bytes, or 'none'")
    limit = parser.parse_args().memory_budget

    seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(0, 10, (96,)))
    callback = MemoryBudgetCallback(limit) if limit != "none" else None
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=callback,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=16, shuffle=True))
    if callback is not None and callback.budget is not None:
        print(callback.budget.summary())


if __name__ == "__main__":
    main()
