"""Dispatch modes of the program that are entered before the scope: what they make of a result is what comes back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.following import following_drawn
from tests.same_bits.judge import DECISIONS
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_STEPS = 8


class Round(TorchDispatchMode):
    """Rounds what one op returns, as a program does that emulates another precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        del types
        out = func(*args, **(kwargs or {}))
        return (out * 256).round() / 256 if func is torch.ops.aten.gelu.default else out


def train(scope: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[bytes]:
    """Train inside the mode; return the bits of the losses and of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))))
    losses = []
    with Round() as mode:
        with scope():
            for _ in range(NUM_STEPS):
                loss = model(torch.randn(256, 64)).square().mean()
                loss.backward()
                losses.append(loss.detach())
        assert mode_stack() == [mode]
    return [tensor.numpy().tobytes() for tensor in (*losses, *(parameter.grad for parameter in model.parameters()))]


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """Train without a budget."""
    return train(contextlib.nullcontext)


@pytest.mark.parametrize("decisions", DECISIONS)
def test_every_decision(plain: list[bytes], decisions: str) -> None:
    """What comes back is what the mode has made, not what the op's kernel made."""
    assert train(lambda: MemoryBudget("1TiB", Config(decisions=DECISIONS[decisions], tier="memory"))) == plain


@pytest.mark.parametrize("seed", range(2))
def test_followed(plain: list[bytes], seed: int) -> None:
    """The same for steps that follow a plan."""
    assert train(lambda: following_drawn(seed)) == plain


def test_a_mode_that_ends_inside_the_scope(plain: list[bytes]) -> None:
    """A program may leave its own mode first: the budget goes on."""
    mode = Round()
    mode.__enter__()
    with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")) as budget:
        x = torch.randn(64, 64, requires_grad=True)
        nn.functional.gelu(x).square().sum().backward()
        mode.__exit__(None, None, None)
        nn.functional.gelu(x).square().sum().backward()
    assert budget.summary().recomputed_bytes > 0
    assert mode_stack() == []
    assert plain
