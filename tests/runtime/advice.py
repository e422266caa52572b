"""Runs that follow BudgetError's advice: small training runs, and how many corrections their budget takes."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.runtime.programs import Residual, mlp, running
from torchdelta import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Run:
    """A way to train a model: the optimizer, and what happens to gradients."""

    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    num_steps: int = 3
    num_micro_batches: int = 1
    sets_to_none: bool = True
    clips: bool = False

    def train(self, model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters after the last step."""
        optimizer = self.make_optimizer(model.parameters())
        for _ in range(self.num_steps):
            for _ in range(self.num_micro_batches):
                loss = loss_of()
                loss.backward()
            if self.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.sets_to_none)
        return [parameter.detach() for parameter in model.parameters()]


class Recurrent(nn.Module):
    """An LSTM and a layer behind it."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read a sequence."""
        return self.head(self.lstm(x)[0])


def perceptron() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a perceptron whose parameters and activations are about as large as each other."""
    model, x = mlp(96, 4), torch.randn(64, 96)
    return model, lambda: model(x).square().mean()


def recurrent() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return an LSTM on short sequences."""
    model, x = Recurrent(), torch.randn(8, 12, 48)
    return model, lambda: model(x).square().mean()


def convolutional() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return convolutions with batch norm."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), Residual(16), nn.Flatten(), nn.LazyLinear(32))
    x = torch.randn(4, 3, 12, 12)
    with torch.no_grad():
        model(x)
    return model, lambda: model(x).square().mean()


def language_model(checkpointing: str = "") -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a small GPT-2, with the blocks checkpointed ("reentrant", "not reentrant") or not."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=200, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model.train()
    tokens = torch.randint(0, 200, (4, 32))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What following the advice came to."""

    named_bytes: list[int]
    peak_bytes: int
    result: list[torch.Tensor]


def follow(
    make_model: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]],
    run: Run,
    budget_bytes: int | str,
    *,
    at_most: int = 4,
    **options: Any,
) -> Followed:
    """Train with the budget that each BudgetError names, until the run gets through."""
    named: list[int] = []
    while True:
        gc.collect()
        torch.manual_seed(0)
        try:
            model, loss_of = make_model()
            with running(budget_bytes, **options) as (budget, _):
                result = run.train(model, loss_of)
            return Followed(named_bytes=named, peak_bytes=budget.summary().peak_bytes, result=result)
        except BudgetError as error:
            named.append(budget_bytes := error.least_budget_bytes)
            if len(named) > at_most:
                raise
        del model, loss_of
