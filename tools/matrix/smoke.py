"""Trains a small model plain and inside a budget, and prints one JSON object; runs in each environment of the matrix.

It imports nothing but torch and torchdelta, so that it shows what the wheel alone can do.
"""

import json
import logging
import platform
import sys

import torch

import torchdelta

NUM_STEPS = 3
BUDGET_SHARE = 0.75


def make_model() -> torch.nn.Module:
    """Make a model with convolutions, running statistics, dropout and attention, the same one each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.GELU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.Flatten(2),
        torch.nn.Linear(256, 64),
        *(torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(4)),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 64, 10),
    )


def traced(batch_size: int = 8) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model and a batch, for `torchdelta trace`."""
    return make_model(), torch.randn(batch_size, 3, 32, 32)


def train() -> list[torch.Tensor]:
    """Train for a few steps; return losses, parameters and buffers."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def main() -> int:
    """Print what was found; 1 if a bit differs, the budget was exceeded, or nothing left."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    plain = train()
    with torchdelta.MemoryBudget("1TiB") as measured:
        train()
    plain_peak_bytes = measured.summary().peak_bytes
    budget_bytes = int(BUDGET_SHARE * plain_peak_bytes)
    with torchdelta.MemoryBudget(budget_bytes) as budget:
        inside = train()
    summary = budget.summary()
    from torchdelta.native.counting import counting_status

    native = counting_status()
    evicted_bytes = summary.swapped_out_bytes + summary.recomputed_bytes
    is_equal = all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchdelta": torchdelta.__version__,
        "is_equal": is_equal,
        "plain_peak_bytes": plain_peak_bytes,
        "budget_bytes": budget_bytes,
        "peak_bytes": summary.peak_bytes,
        "evicted_bytes": evicted_bytes,
        "native": "built" if native.is_on else native.reason,
    }
    print(json.dumps(result))
    return 0 if is_equal and summary.peak_bytes <= budget_bytes and evicted_bytes > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
