"""Random training programs that exchange, resize, copy and reload the storages of their tensors while they run.

Left out, because plain eager is undefined there or because saved-tensor hooks of any kind change it:
- new content for a leaf between its forward and its backward (`p.data = other`): plain autograd keeps the leaf itself
  and reads the new content, while any saved-tensor hook is handed a detached alias and keeps the old one. Exchanges for
  equal content are in.
- `set_` on an activation: it counts as an in-place op, and plain refuses the backward of a node that saved it.
- a gradient that flows between nodes and is left empty: plain raises in the next node.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.same_bits.judge import Scope

WIDTH = 48
BATCH = 256


def _reload(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)  # hooks do not travel
    file.seek(0)
    return torch.load(file)


def _refill(tensor: torch.Tensor) -> None:
    """Free a storage and fill it again with the content that it had."""
    storage = tensor.untyped_storage()
    if not storage.resizable():  # it was loaded from a file
        return
    content, size_bytes = storage.clone(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(size_bytes)
    storage.copy_(content)


def _exchange_for_equal(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _exchange_for_part(tensor: torch.Tensor) -> None:
    """Take the last rows of a larger storage."""
    larger = torch.cat([tensor.data, tensor.data])
    tensor.data = larger[len(tensor) :]


def _exchange_twice(tensor: torch.Tensor) -> None:
    content = tensor.data.clone()
    tensor.data = torch.empty(0)
    torch.full((tensor.numel() + 8,), 3.0)  # it may take the place that was freed
    tensor.data = content


def _set_equal(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor.detach().clone().untyped_storage(), 0, tensor.shape, tensor.stride())


KEEPING: list[Callable[[torch.Tensor], None]] = [_exchange_for_equal, _exchange_for_part, _exchange_twice]
"""What leaves the content of a tensor as it was."""

COPYING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    copy.deepcopy,
    _reload,
    lambda tensor: tensor.to(torch.float64).to(tensor.dtype),
    lambda tensor: tensor.clone(),
]
"""What makes an equal tensor."""

SAVING: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
    (_reload, lambda packed: packed),
    (lambda tensor: tensor.detach().clone(), _reload),
    (lambda tensor: tensor.to(torch.float64), lambda packed: packed.to(torch.float32)),
    (lambda tensor: tensor.detach().clone(), lambda packed: packed.set_(packed.clone())),
]
"""Users' saved-tensor hooks."""


class Program:
    """One random program; the same seed does the same things, whatever it runs in."""

    def __init__(self, seed: int, depth: int | None) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(self._layer() for _ in range(depth or self.draw.randint(3, 6)))
        self.seen: list[torch.Tensor] = []
        self.waiting: list[torch.Tensor] = []  # gradients that are there already, of one shape
        for layer in self.layers:
            layer.register_forward_hook(self._after_layer)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._after_accumulation)
            for parameter in self.layers.parameters()
        ]

    def _layer(self) -> nn.Module:
        kind = self.draw.randrange(5)
        if kind == 0:
            return nn.LayerNorm(WIDTH)
        activation = self.draw.choice([nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Softmax(-1)])
        linear = nn.Linear(WIDTH, WIDTH, bias=self.draw.random() < 0.5)
        return nn.Sequential(linear, activation, *([nn.Dropout(0.2)] if kind == 1 else []))

    def _after_layer(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if self.draw.random() < 0.4:
            self.draw.choice(KEEPING)(output)
        if self.draw.random() < 0.3:
            self.seen.append(self.draw.choice(COPYING)(output.detach()).sum())
        if self.draw.random() < 0.2:
            output = output.to(torch.float64).to(torch.float32)
        output.register_hook(self._on_gradient)
        return output

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        way = self.draw.randrange(7)
        if way == 0:
            self.draw.choice([*KEEPING, _set_equal, _refill])(gradient)
        elif way == 1:
            return self.draw.choice(COPYING)(gradient)
        elif way == 2:
            gradient.data = torch.rand_like(gradient)
        elif way == 3:
            replacement = gradient.clone()
            replacement.data = gradient.data * 0.5
            return replacement
        return None

    def _after_accumulation(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        way = self.draw.randrange(9)
        if way == 0:
            self.draw.choice([*KEEPING, _set_equal, _refill])(gradient)
        elif way == 1:
            parameter.grad = self.draw.choice(COPYING)(gradient)
        elif way == 2:  # offload
            self.seen.append(gradient.clone())
            gradient.data = torch.empty(0)
            return
        elif way == 3 and gradient.untyped_storage().resizable():
            self.seen.append(gradient.clone())
            gradient.untyped_storage().resize_(0)
            parameter.grad = None
            return
        elif way == 4:
            with torch.no_grad():
                gradient.set_(torch.rand_like(gradient))
        elif way == 5:
            for other in self.waiting:
                if other.shape == gradient.shape and other is not gradient:
                    gradient.data, other.data = other.data, gradient.data
                    break
        elif way == 6:  # another size for a while
            content = gradient.clone()
            gradient.data = torch.rand(self.draw.randint(1, 5000))
            self.seen.append(gradient.sum())
            gradient.data = content
        if parameter.grad is not None:
            self.waiting.append(parameter.grad)

    def _between_steps(self) -> None:
        for parameter in self.layers.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.shape == parameter.shape:
                self.seen.append(gradient.clone())
                if self.draw.random() < 0.5:
                    parameter.data = parameter.data - 0.01 * gradient
                else:
                    with torch.no_grad():
                        parameter.sub_(gradient, alpha=0.01)
            if gradient is not None and (gradient.shape != parameter.shape or self.draw.random() < 0.8):
                parameter.grad = None
            if self.draw.random() < 0.2:
                self.draw.choice([*KEEPING, _set_equal])(parameter)
        self.waiting.clear()

    def run(self, scope: Scope) -> dict[str, Any]:
        """Train for a few steps inside a scope; return all that was seen."""
        losses: list[torch.Tensor] = []
        with scope():
            for _ in range(3):
                x = torch.randn(BATCH, WIDTH)
                for layer in self.layers:
                    saving = self.draw.choice(SAVING) if self.draw.random() < 0.25 else None
                    with torch.autograd.graph.saved_tensors_hooks(*saving) if saving else contextlib.nullcontext():
                        x = layer(x)
                loss = x.square().mean()
                loss.backward()
                losses.append(loss.detach().clone())
                self._between_steps()
        for handle in self.handles:  # a cycle that no collector sees
            handle.remove()
        return {"losses": losses, "seen": self.seen, "parameters": [p.detach() for p in self.layers.parameters()]}


def program(seed: int, depth: int | None = None) -> Callable[[Scope], dict[str, Any]]:
    """Return the step of one seed, for the judge; `depth`: with so many layers."""
    return lambda scope: Program(seed, depth).run(scope)
