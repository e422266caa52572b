"""An ordinary training script: a small GPT-2 on byte text. It knows nothing of memory budgets, and that is its point.

python train_gpt2.py --steps 3 --batch 12
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCE = 256
TEXT = b"The quick brown fox jumps over the lazy dog, and the dog dreams of the fox. "


def main() -> int:
    """Train and print the loss of every step, the last one to the last bit."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6,
        n_embd=options.width,
        n_head=options.width // 64,
        vocab_size=8000,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = torch.tensor(list(TEXT * (2 + options.batch * SEQUENCE // len(TEXT))))
    loss_value = float("nan")
    for step in range(options.steps):
        input_ids = data[: options.batch * SEQUENCE].view(options.batch, SEQUENCE)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_value = loss.item()
        print(f"step {step + 1} loss {loss_value:.6f}", flush=True)
    print(f"final loss {loss_value.hex()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
