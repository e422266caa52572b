"""The models that are measured, built with fixed seeds and random weights: nothing is downloaded.

Every builder seeds each generator that a model might draw from, so that two processes with the same arguments train
on the same bits. The sizes are those that the acceptance figures name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LEARNING_RATE = 1e-2
NUM_LAYERS, WIDTH, NUM_HEADS, VOCABULARY, SEQUENCE = 6, 384, 6, 8000, 256


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model with one fixed batch and the loss of a forward pass over it."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    compute_loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]

    def loss(self) -> Tensor:
        """Run the forward pass."""
        return self.compute_loss(self.model, self.batch)

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one ordinary training step, to its end."""
        loss = self.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random: some models draw their masks with numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is the one that models use
    random.seed(seed)


def gpt2_like(batch_size: int = 4) -> Workload:
    """Return a causal transformer of 6 layers x 384, vocabulary 8,000, sequence 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=NUM_LAYERS,
        n_embd=WIDTH,
        n_head=NUM_HEADS,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _language_workload("gpt2-like", GPT2LMHeadModel(config), batch_size, VOCABULARY, SEQUENCE)


def bert_like(batch_size: int = 4) -> Workload:
    """Return a masked-language transformer of the same sizes."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=NUM_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
    )
    return _language_workload("bert-like", BertForMaskedLM(config), batch_size, VOCABULARY, SEQUENCE)


def resnet50(batch_size: int = 16) -> Workload:
    """Return a ResNet-50 on 160 x 160 pictures."""
    from benchmarks.resnet import resnet50 as build

    model = build()
    batch = {"pixels": torch.randn(batch_size, 3, 160, 160), "labels": torch.randint(1000, (batch_size,))}
    return Workload(name="resnet50", model=model, batch=batch, compute_loss=_classification_loss)


def unet(batch_size: int = 8) -> Workload:
    """Return a denoising U-Net on 64 x 64 pictures; the noise is drawn once, like every batch here."""
    from benchmarks.unet import UNet

    model = UNet()
    batch = {
        "noisy": torch.randn(batch_size, 3, 64, 64),
        "times": torch.randint(1000, (batch_size,)),
        "noise": torch.randn(batch_size, 3, 64, 64),
    }
    return Workload(name="unet", model=model, batch=batch, compute_loss=_denoising_loss)


def tiny(batch_size: int = 2) -> Workload:
    """Return a GPT-2 of 2 layers x 64: for measurements that need many steps, and for trying the harness."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=2,
        vocab_size=500,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _language_workload("tiny", GPT2LMHeadModel(config), batch_size, 500, 64)


def _language_workload(name: str, model: nn.Module, batch_size: int, vocabulary: int, sequence: int) -> Workload:
    batch = {"input_ids": torch.randint(vocabulary, (batch_size, sequence))}
    return Workload(name=name, model=model, batch=batch, compute_loss=_language_loss)


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def _classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"])


def _denoising_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["noisy"], batch["times"]), batch["noise"])


MODELS: dict[str, Callable[..., Workload]] = {
    "gpt2-like": gpt2_like,
    "bert-like": bert_like,
    "resnet50": resnet50,
    "unet": unet,
    "tiny": tiny,
}
MEASURED_MODELS = ("gpt2-like", "bert-like", "resnet50", "unet")
OPTIMIZERS = ("sgd", "adamw")


def build(name: str, batch_size: int | None = None, seed: int = 0) -> Workload:
    """Build a workload by name, in train mode (dropout and batch statistics on)."""
    seed_everything(seed)
    workload = MODELS[name]() if batch_size is None else MODELS[name](batch_size)
    workload.model.train()
    return workload


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build plain SGD (no momentum: no state) or AdamW (two states per parameter)."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 10)
    message = f"no optimizer named {name!r}; there are {', '.join(OPTIMIZERS)}"
    raise ValueError(message)
