"""A training step round a model: forward, backward, update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.ledger.figures import Step

__all__ = ["autocast", "with_step"]

_LOW: Final = {"amp": torch.float16, "amp-bf16": torch.bfloat16}


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of a figure's precision."""
    low = _LOW.get(precision)
    return contextlib.nullcontext() if low is None else torch.autocast("cuda", low)


def with_step(model: nn.Module, inputs: Any, loss: Callable[..., torch.Tensor], step: Step) -> Any:
    """Return a model, its inputs and a step: forward (under autocast if the figure was), backward, update."""
    made: list[torch.optim.Optimizer] = []
    precision = step.precision

    def infer(model: nn.Module, inputs: Any) -> None:
        with torch.no_grad(), autocast(precision):
            model(inputs[0])
        next(model.parameters()).flatten()[0].backward()  # a step has a backward; only the forward is priced

    def train(model: nn.Module, inputs: Any) -> None:
        if not made and step.optimizer != "none":
            made.append(_optimizer(model, step.optimizer))
        with autocast(precision):
            value = loss(model, inputs)
        value.backward()
        for optimizer in made:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    if precision == "fp16":  # apex's O2 and plain half(): all in float16
        model = model.half()
    return model, inputs, infer if step.forward_only else train


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-4, foreach=True)
    # "adamw-loop": transformers of 2022 updated one parameter at a time.
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=name != "adamw-loop")
