"""Models whose steps are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.models import build_optimizer, seed_everything
from benchmarks.networks.vision import Bottleneck

if TYPE_CHECKING:
    from collections.abc import Callable

SEQUENCE, VOCABULARY = 64, 300


def _language_model(kind: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": SEQUENCE}
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    else:
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
        model = BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE))
    tokens = torch.randint(VOCABULARY, (4, SEQUENCE))
    return model.train(), lambda model: model(input_ids=tokens, labels=tokens).loss


def _resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    blocks = [Bottleneck(16, 16, 1), Bottleneck(64, 16, 1), Bottleneck(64, 16, 2), Bottleneck(64, 16, 2)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return model.train(), lambda model: nn.functional.cross_entropy(model(pictures), labels)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]] = {
    "gpt2": lambda: _language_model("gpt2"),
    "bert": lambda: _language_model("bert"),
    "resnet": _resnet,
}


class Program:
    """A model with its batch and its optimizer, always made alike."""

    def __init__(self, model_name: str, optimizer_name: str) -> None:
        seed_everything(0)
        self.model, self.loss = MODELS[model_name]()
        self.optimizer = build_optimizer(optimizer_name, self.model)

    def step(self) -> None:
        """Train once."""
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
