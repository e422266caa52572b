"""What is trained on the GPU: GPT-2 and ResNet-50, with seeds, sizes and the peers' ways to save memory."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpt2 import GPT2, Block
from benchmarks.resnet import Bottleneck, resnet50

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on its device, and the loss of one fixed batch."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute_loss: Callable[[], torch.Tensor]

    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""
        loss = self.compute_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def digest(self, *losses: torch.Tensor) -> str:
        """Return the SHA-256 of losses, parameters, buffers and the device's generator."""
        sha = hashlib.sha256()
        tensors = [*losses, *self.model.parameters(), *self.model.buffers()]
        device = tensors[0].device
        is_on_host = device.type == "cpu"
        generators = () if is_on_host else torch.get_device_module(device.type).default_generators
        tensors += [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        for tensor in tensors:
            sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def gpt2(device: torch.device, *, is_tiny: bool) -> Subject:
    """Build GPT-2 (124 million parameters, 1,024 tokens, batch 8) with AdamW."""
    torch.manual_seed(0)
    layers, width, heads, vocabulary, length, batch = (
        (2, 32, 2, 64, 32, 2) if is_tiny else (12, 768, 12, 50257, 1024, 8)
    )
    model = GPT2(layers, width, heads, vocabulary, length).to(device).train()
    tokens = torch.randint(vocabulary, (batch, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Subject(name="gpt2", model=model, optimizer=optimizer, compute_loss=lambda: model(tokens))


def resnet(device: torch.device, *, is_tiny: bool) -> Subject:
    """Build ResNet-50 (224 pixels, batch 64) with SGD and momentum."""
    torch.manual_seed(0)
    batch, pixels = (2, 32) if is_tiny else (64, 224)
    model = resnet50(10 if is_tiny else 1000).to(device).train()
    pictures = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(10, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Subject(
        name="resnet50",
        model=model,
        optimizer=optimizer,
        compute_loss=lambda: nn.functional.cross_entropy(model(pictures), labels),
    )


SUBJECTS: dict[str, Callable[..., Subject]] = {"gpt2": gpt2, "resnet50": resnet}


@contextlib.contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Wrap every block of a model in torch's own checkpointing for a while."""
    blocks = [module for module in model.modules() if isinstance(module, Block | Bottleneck)]
    for block in blocks:
        forward = block.forward

        def recomputing(*args: Any, forward: Any = forward) -> Any:
            return checkpoint(forward, *args, use_reentrant=False)

        block.forward = recomputing
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Fix every algorithm, so that a plain run equals itself."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
