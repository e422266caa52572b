"""Ops that call functions of the program: `torch.cond`, `scan`, `while_loop`, `flex_attention` without a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from tests.runtime.parts import running_session
from tests.runtime.record.partly import MARGIN, NUM_LAYERS, ROWS, WIDTH, Stack, following, train
from tests.same_bits.judge import assert_same_bits, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.gate import load_gate

if TYPE_CHECKING:
    from tests.same_bits.judge import Scope

# Dynamo looks at `.grad` of other tensors than leaves, and flex_attention is slow without a compiler.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


def _cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


def test_cond_trains() -> None:
    """Both branches, between layers whose tensors leave."""

    def step(scope: Scope) -> dict[str, Any]:
        weight = torch.randn(16, 16, requires_grad=True)
        with scope():
            for sign in (1, -1):
                x = (torch.full((16, 16), 0.5 * sign) @ weight.square()).tanh()
                (_cond(x).exp() * x).sum().backward()
        return {"gradient": weight.grad}

    assert_same_bits(step)


def test_loops_and_attention_run() -> None:
    """Without gradients, and `scan` with them."""

    def step(scope: Scope) -> dict[str, Any]:
        x, q = torch.randn(8, 16, requires_grad=True), torch.randn(1, 2, 128, 16)
        with scope():
            _, y = scan(lambda total, x: (total + x, (total * x).sin()), torch.zeros(16), x)
            y.sum().backward()
            with torch.no_grad():
                _, doubled = while_loop(
                    lambda i, _x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(4))
                )
                attention = flex_attention(q, q, q)
        return {"gradient": x.grad, "doubled": doubled, "attention": attention}

    assert_same_bits(step)


def test_a_branch_that_writes_what_an_op_has_made() -> None:
    """That op no longer makes the content: the operator is called itself, without `torch.cond`, which compiles."""

    def update(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    def step(scope: Scope) -> dict[str, Any]:
        base, weight = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
        with scope():
            source = base * 3
            with torch.no_grad():
                total = torch.ops.higher_order.cond(torch.tensor(True), update, torch.sum, (source,))
            loss = ((source + 1) * weight).exp().sum() + (source * weight).sum()
            del source
            loss.backward()
        return {"gradient": weight.grad, "total": total}

    assert_same_bits(step)


def test_cond_in_steps_that_are_recorded_in_part() -> None:
    """Also where it is first called in such a step."""
    if isinstance(error := load_gate(), NativeError):
        pytest.skip(str(error))

    def step(stack: Stack, index: int) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            x = stack.block(layer, x)
        return (_cond(x) if index >= first else x).square().mean()

    for first in (0, 12):
        seed_everything()
        plain, _ = train(step)
        with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
            train(step, 13)
        seed_everything()
        with following(int(unlimited.summary().peak_bytes * MARGIN)):
            seen, num_partial = train(step)
            assert running_session().partial.num_steps >= num_partial
        assert seen == plain
        assert num_partial or first == 0, "the test says nothing: no step was recorded in part"
