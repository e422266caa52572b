"""The models that are measured and traced, by name, with random weights: nothing is downloaded.

A recipe called with a batch size gives a model and one batch, which is what `torchdelta trace` and `torchdelta fit`
ask a function for: `torchdelta trace benchmarks.models:resnet50 --batch-size 64`. `build` makes a workload that trains
here: it seeds each generator that a model might draw from, so that two processes with the same arguments train on the
same bits. Everything is in float32 and in training mode, dropout included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.networks import language, vision

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
Step = tuple[nn.Module, Inputs]

LEARNING_RATE = 1e-2
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to build a model and to draw a batch for it.

    Attributes:
        network: Builds the model. It returns its loss, or an object whose `loss` is that.
        draw: Draws a batch from its number of samples and their size (tokens or pixels).
        batch_size: The usual number of samples.
        size: The usual size of one.
    """

    network: Callable[[], nn.Module]
    draw: Callable[[int, int], Inputs]
    batch_size: int
    size: int

    def __call__(self, batch_size: int) -> Step:
        """Return the model and a batch of the usual size."""
        return self.network().train(), self.draw(batch_size, self.size)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with one fixed batch."""

    model: nn.Module
    inputs: Inputs

    def loss(self) -> Tensor:
        """Run the forward pass."""
        return loss_of(self.model, self.inputs)

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one ordinary training step, to its end."""
        loss = self.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def loss_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run a model's forward pass over a batch."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return output if isinstance(output, Tensor) else output.loss


def build(
    name: str, batch_size: int | None = None, seed: int = 0, *, size: int | None = None, device: str = "cpu"
) -> Workload:
    """Build a workload of `MODELS` from a seed, on CPU, and move it to its device."""
    seed_everything(seed)
    recipe = MODELS[name]
    model, inputs = replace(recipe, size=size or recipe.size)(batch_size or recipe.batch_size)
    if device != "cpu":
        assert isinstance(inputs, tuple), "the models for other devices need torch alone"
        model, inputs = model.to(device), tuple(tensor.to(device) for tensor in inputs)
    return Workload(model=model, inputs=inputs)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random: some models draw their masks with numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator is the one that models use
    random.seed(seed)


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build plain SGD (no momentum: no state) or AdamW (two states per parameter)."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 10)
    raise ValueError(f"no optimizer named {name!r}; there are {', '.join(OPTIMIZERS)}")


def of_transformers(class_name: str, *, batch_size: int, size: int, vocab_size: int, **settings: Any) -> Recipe:
    """Return the recipe of a language model of transformers; `settings` are its configuration's."""

    def network() -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return model_class(model_class.config_class(vocab_size=vocab_size, use_cache=False, **settings))

    def draw(num_samples: int, num_tokens: int) -> Inputs:
        tokens = torch.randint(vocab_size, (num_samples, num_tokens))
        return {"input_ids": tokens, "labels": tokens}

    return Recipe(network=network, draw=draw, batch_size=batch_size, size=size)


def gpt2(*, batch_size: int = 4, size: int = 256, vocab_size: int = 8000, **settings: Any) -> Recipe:
    """Return the recipe of a GPT-2 of transformers."""
    settings = {"n_positions": size, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"} | settings
    return of_transformers("GPT2LMHeadModel", batch_size=batch_size, size=size, vocab_size=vocab_size, **settings)


def plain_gpt2(num_layers: int, width: int, num_heads: int, *, vocabulary: int, batch_size: int, size: int) -> Recipe:
    """Return the recipe of a GPT-2 in torch alone."""
    return Recipe(
        network=lambda: language.GPT2(num_layers, width, num_heads, vocabulary, size),
        draw=lambda num_samples, num_tokens: (torch.randint(vocabulary, (num_samples, num_tokens)),),
        batch_size=batch_size,
        size=size,
    )


def classifier(
    network: Callable[[], nn.Module], *, batch_size: int, size: int, num_classes: int = vision.NUM_CLASSES
) -> Recipe:
    """Return the recipe of a network that classifies pictures."""

    def draw(num_samples: int, num_pixels: int) -> Inputs:
        return torch.randn(num_samples, 3, num_pixels, num_pixels), torch.randint(num_classes, (num_samples,))

    return Recipe(network=lambda: vision.Classifier(network()), draw=draw, batch_size=batch_size, size=size)


def picture_model_of_transformers(class_name: str, *, batch_size: int, size: int, **settings: Any) -> Recipe:
    """Return the recipe of a picture classifier of transformers; `settings` are its configuration's."""

    def network() -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return model_class(model_class.config_class(image_size=size, num_labels=vision.NUM_CLASSES, **settings))

    def draw(num_samples: int, num_pixels: int) -> Inputs:
        pictures = torch.randn(num_samples, 3, num_pixels, num_pixels)
        return {"pixel_values": pictures, "labels": torch.randint(vision.NUM_CLASSES, (num_samples,))}

    return Recipe(network=network, draw=draw, batch_size=batch_size, size=size)


def denoiser(*, batch_size: int, size: int, **settings: Any) -> Recipe:
    """Return the recipe of a U-Net that predicts the noise in pictures."""

    def draw(num_samples: int, num_pixels: int) -> Inputs:
        noisy, noise = torch.randn(2, num_samples, 3, num_pixels, num_pixels)
        return noisy, torch.randint(1000, (num_samples,)), noise

    return Recipe(network=lambda: vision.Denoiser(vision.UNet(**settings)), draw=draw, batch_size=batch_size, size=size)


def encoder(num_layers: int, width: int, num_heads: int, hidden_width: int, *, batch_size: int, size: int) -> Recipe:
    """Return the recipe of torch's own encoder blocks over features, each position with a label."""

    def draw(num_samples: int, length: int) -> Inputs:
        return torch.randn(num_samples, length, width), torch.randint(vision.NUM_CLASSES, (num_samples, length))

    return Recipe(
        network=lambda: language.Encoder(num_layers, width, num_heads, hidden_width, vision.NUM_CLASSES),
        draw=draw,
        batch_size=batch_size,
        size=size,
    )


# -- the models of the papers

_IMAGE_WIDTH = 224
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_GPT2_SIZES = {"size": 1024, "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
_GPT2_LARGE = {**_GPT2_SIZES, "n_embd": 1280, "n_layer": 36, "n_head": 20}


def _bert_large(attention: str) -> Recipe:
    sizes = {"batch_size": 8, "size": 384, "vocab_size": 30522}
    return of_transformers("BertForMaskedLM", **sizes, **_BERT_LARGE, attn_implementation=attention)


resnet50 = classifier(vision.build_resnet, batch_size=64, size=_IMAGE_WIDTH)
resnet101 = classifier(lambda: vision.build_resnet((3, 4, 23, 3)), batch_size=64, size=_IMAGE_WIDTH)
vgg16 = classifier(vision.build_vgg16, batch_size=64, size=_IMAGE_WIDTH)
alexnet = classifier(vision.build_alexnet, batch_size=64, size=_IMAGE_WIDTH)
bert_large = _bert_large("eager")
bert_large_sdpa = _bert_large("sdpa")
gpt2_large = gpt2(**_GPT2_LARGE, attn_implementation="eager")
gpt2_large_sdpa = gpt2(**_GPT2_LARGE, attn_implementation="sdpa")
gpt2_xl = gpt2(**_GPT2_SIZES, n_embd=1600, n_layer=48, n_head=25, attn_implementation="eager")


# -- the models that train here

_SMALL_BERT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}

MODELS: dict[str, Recipe] = {
    "gpt2-like": gpt2(n_layer=6, n_embd=384, n_head=6),
    "bert-like": of_transformers(
        "BertForMaskedLM", batch_size=4, size=256, vocab_size=8000, max_position_embeddings=256, **_SMALL_BERT
    ),
    "resnet50": replace(resnet50, batch_size=16, size=160),
    "unet": denoiser(batch_size=8, size=64),
    # On request: most of their memory is parameters and optimizer states.
    "gpt2-small": gpt2(batch_size=2, vocab_size=50257, bos_token_id=50256, eos_token_id=50256),
    "gpt2-small-batch-4": gpt2(batch_size=4, vocab_size=50257, bos_token_id=50256, eos_token_id=50256),
    "bert-base": of_transformers("BertForMaskedLM", batch_size=4, size=256, vocab_size=30522),
    "vit-base": picture_model_of_transformers("ViTForImageClassification", batch_size=4, size=_IMAGE_WIDTH),
    "convnext-tiny": picture_model_of_transformers("ConvNextForImageClassification", batch_size=4, size=_IMAGE_WIDTH),
    # Of the papers, with small pictures or few tokens: `headlines` trains large batches of them.
    "resnet50-64px": replace(resnet50, batch_size=25, size=64),
    "resnet101-64px": replace(resnet101, batch_size=28, size=64),
    "gpt2-12x256": gpt2(size=128, vocab_size=2000, n_layer=12, n_embd=256, n_head=4),
    # For measurements that need many steps, and for trying the harness.
    "tiny": gpt2(batch_size=2, size=64, vocab_size=500, n_layer=2, n_embd=64, n_head=2),
    "transformer-8": encoder(8, 384, 6, 1536, batch_size=8, size=64),
    # For a GPU, in torch alone.
    "gpt2-124m": plain_gpt2(12, 768, 12, vocabulary=50257, batch_size=8, size=1024),
    "gpt2-nano": plain_gpt2(2, 32, 2, vocabulary=64, batch_size=2, size=32),
}
MEASURED_MODELS = ("gpt2-like", "bert-like", "resnet50", "unet")
