"""The models of the papers, each as a function for `torchdelta trace` and `torchdelta fit`: batch size in, step out.

`torchdelta trace benchmarks.zoo:resnet50 --batch-size 64`. Transformers models come from their configurations alone (no
weights are fetched), with eager attention unless the name says otherwise; the vision models are the shapes of
torchvision's, written out here. Everything is in float32 and in training mode, dropout included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import resnet

if TYPE_CHECKING:
    from torch import Tensor

Step = tuple[nn.Module, Any]

_IMAGE_WIDTH = 224
_NUM_CLASSES = 1000


class Classifier(nn.Module):
    """A vision model and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.network(images), labels)


def resnet50(batch_size: int) -> Step:
    """ResNet-50 on ImageNet's size."""
    return _vision(resnet.resnet50(), batch_size)


def resnet101(batch_size: int) -> Step:
    """ResNet-101 on ImageNet's size."""
    return _vision(resnet.resnet101(), batch_size)


def vgg16(batch_size: int) -> Step:
    """VGG-16 without batch norm (Simonyan and Zisserman 2014, configuration D)."""
    layers: list[nn.Module] = []
    in_channels = 3
    for width, num_layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(num_layers):
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            in_channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, _NUM_CLASSES),
    ]
    return _vision(nn.Sequential(*layers), batch_size)


def alexnet(batch_size: int) -> Step:
    """AlexNet in the single-tower form of torchvision (Krizhevsky 2014)."""
    network = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, _NUM_CLASSES),
    )
    return _vision(network, batch_size)


def bert_large(batch_size: int) -> Step:
    """BERT-Large with its masked-language head, 384 tokens."""
    return _bert(batch_size, "eager")


def bert_large_sdpa(batch_size: int) -> Step:
    """BERT-Large, 384 tokens, torch's fused attention."""
    return _bert(batch_size, "sdpa")


def gpt2_large(batch_size: int) -> Step:
    """GPT2-Large, 1024 tokens."""
    return build_gpt2(batch_size, "eager", n_embd=1280, n_layer=36, n_head=20)


def gpt2_large_sdpa(batch_size: int) -> Step:
    """GPT2-Large, 1024 tokens, torch's fused attention."""
    return build_gpt2(batch_size, "sdpa", n_embd=1280, n_layer=36, n_head=20)


def gpt2_xl(batch_size: int) -> Step:
    """GPT2-XL, 1024 tokens."""
    return build_gpt2(batch_size, "eager", n_embd=1600, n_layer=48, n_head=25)


def _vision(network: nn.Module, batch_size: int) -> Step:
    images = torch.randn(batch_size, 3, _IMAGE_WIDTH, _IMAGE_WIDTH)
    return Classifier(network), (images, torch.randint(0, _NUM_CLASSES, (batch_size,)))


def _bert(batch_size: int, attention: str) -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation=attention,
    )
    tokens = torch.randint(0, config.vocab_size, (batch_size, 384))
    return BertForMaskedLM(config).train(), {"input_ids": tokens, "labels": tokens}


def build_gpt2(batch_size: int, attention: str, **sizes: int) -> Step:
    """GPT-2 of any size, on 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**sizes, attn_implementation=attention, use_cache=False, loss_type="ForCausalLM")
    tokens = torch.randint(0, config.vocab_size, (batch_size, 1024))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}
