"""What is trained on the GPU: GPT-2 and ResNet-50, and the peers' ways to save memory."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks import models
from benchmarks.networks.language import Block
from benchmarks.networks.vision import Bottleneck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A workload on its device, with its optimizer."""

    name: str
    workload: models.Workload
    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.workload.model

    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""
        loss = self.workload.loss()
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
    workload = models.build("gpt2-nano" if is_tiny else "gpt2-124m", device=str(device))
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    return Subject(name="gpt2", workload=workload, optimizer=optimizer)


def resnet(device: torch.device, *, is_tiny: bool) -> Subject:
    """Build ResNet-50 (224 pixels, batch 256) with SGD and momentum."""
    batch_size, size = (2, 32) if is_tiny else (256, 224)
    workload = models.build("resnet50", batch_size, size=size, device=str(device))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
    return Subject(name="resnet50", workload=workload, optimizer=optimizer)


SUBJECTS: dict[str, Callable[..., Subject]] = {"gpt2": gpt2, "resnet50": resnet}
# Budgets as shares of the plain peaks. GPT-2's loss alone needs three tensors of its logits' size, 1.5 GiB each.
SHARES = {"gpt2": 0.65, "resnet50": 0.5}


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
