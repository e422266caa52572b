"""Steps whose kernels take next to nothing."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks import models

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TINY_OPS = 20_000
_LENGTH = 40
_LENGTHS = range(32, 16, -1)
_NUM_USUAL_LENGTHS = 4  # most steps have one of these


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A step, how many are run for one measurement, and how many kinds of steps it usually is."""

    step: Callable[[], object]
    num_steps: int = 40
    num_kinds: int = 1
    restart: Callable[[], object] = lambda: None  # begins the order of the steps anew


def gpt2(num_rows: int = 1, num_tokens: int = 16) -> Subject:
    """Train a GPT-2 of 12 layers and width 64."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 128, (num_rows, num_tokens))
    model = transformers.GPT2LMHeadModel(config)
    return _training(model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss)


def gpt2_of_lengths(num_rows: int = 8) -> Subject:
    """Train the same GPT-2 on sequences of 16 lengths, some of which are rare, in a drawn order."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, attn_implementation="eager"
    )
    rng = random.Random()
    batches = [torch.randint(0, 128, (num_rows, length)) for length in _LENGTHS]
    weights = [1 / (rank + 1) for rank in range(len(_LENGTHS))]
    model = transformers.GPT2LMHeadModel(config)

    def loss() -> torch.Tensor:
        (tokens,) = rng.choices(batches, weights)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    training = _training(model, loss, num_steps=120)
    return replace(training, num_kinds=_NUM_USUAL_LENGTHS, restart=lambda: rng.seed(0))


def bert(num_rows: int = 1, num_tokens: int = 16) -> Subject:
    """Train a BERT of 12 layers and width 64."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=2, intermediate_size=128, vocab_size=128
    )
    tokens = torch.randint(0, 128, (num_rows, num_tokens))
    model = transformers.BertForMaskedLM(config)
    return _training(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def resnet50(num_pictures: int = 2) -> Subject:
    """Train the graph of a ResNet-50 with a 16th of its channels on pictures of 32 pixels."""
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[3, 4, 6, 3])
    model = transformers.ResNetForImageClassification(config)
    pictures, labels = torch.randn(num_pictures, 3, 32, 32), torch.zeros(num_pictures, dtype=torch.long)
    return _training(model, lambda: model(pixel_values=pictures, labels=labels).loss)


def unet(num_pictures: int = 1, size: int = 8) -> Subject:
    """Train a small diffusion U-Net."""
    model, inputs = models.denoiser(batch_size=num_pictures, size=size, width=8)(num_pictures)
    return _training(model, lambda: models.loss_of(model, inputs))


def lstm() -> Subject:
    """Train an LSTM cell over 40 steps of time."""
    cell, head = nn.LSTMCell(16, 16), nn.Linear(16, 2)
    x = torch.randn(_LENGTH, 4, 16)

    def loss() -> torch.Tensor:
        state = None
        for moment in x:
            state = cell(moment, state)
        assert state is not None
        return head(state[0]).square().mean()

    return _training(nn.ModuleList([cell, head]), loss)


def mlp_with_adam() -> Subject:
    """Train a perceptron of three layers with Adam, as reinforcement learning does."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(32, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _training(model, lambda: model(x).square().mean(), optimizer, num_steps=400)


def tiny_ops() -> Subject:
    """Run 20,000 additions of one number, and the backward of all."""
    start = torch.zeros(1, requires_grad=True)

    def step() -> None:
        x = start
        for _ in range(NUM_TINY_OPS):
            x = x + 1
        x.sum().backward()

    return Subject(step=step, num_steps=6)


def _training(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 40,
) -> Subject:
    model.train()
    chosen = torch.optim.SGD(model.parameters(), lr=1e-4) if optimizer is None else optimizer

    def step() -> None:
        loss().backward()
        chosen.step()
        chosen.zero_grad()

    return Subject(step=step, num_steps=num_steps)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet50": resnet50,
    "unet": unet,
    "lstm": lstm,
    "mlp-adam": mlp_with_adam,
    "tiny-ops": tiny_ops,
}

# The activations of the steps above are smaller than the gradients: no budget presses them. At these batches some do.
PRESSED: dict[str, Callable[[], Subject]] = {
    "gpt2-8x32": functools.partial(gpt2, 8, 32),
    "gpt2-16-lengths": gpt2_of_lengths,
    "bert-8x32": functools.partial(bert, 8, 32),
    "resnet50-8": functools.partial(resnet50, 8),
    "unet-8": functools.partial(unet, 8, 16),
}
