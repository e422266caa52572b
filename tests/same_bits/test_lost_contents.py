"""What was overwritten is never what a recomputation needs, however the tensors between the two come to die."""

from __future__ import annotations

from typing import Any

import torch

from tests.same_bits.judge import UNLIMITED, Scope, assert_same_bits, inside_budget, plain_outcome, run, tracked_bytes
from torchdelta import Config, MemoryBudget, SavedBuffer


def test_input_written_while_a_tensor_made_from_it_lives() -> None:
    """An input is written in place; only then dies the tensor from which a saved one would be recomputed."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        with scope():
            y = x * 2
            loss = (y.sin() @ w).sum()
            x.add_(1)
            del y
            loss.backward()
        return {"x": x, "grad": w.grad}

    assert_same_bits(step)


def test_input_written_before_the_tensor_made_from_it_is_used() -> None:
    """An input is written in place before anything that depends on it is dropped."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        with scope():
            y = (x * 2).cos()
            x.add_(1)
            loss = (y.sin() @ w).sum()
            del y
            loss.backward()
        return {"x": x, "grad": w.grad}

    assert_same_bits(step)


def test_input_written_after_the_loss_that_saved_a_tensor_between_is_done() -> None:
    """A saved tensor is recomputed from one that another loss saved, had swapped, and has let go of."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w, v = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with scope():
            y = x * 2
            first, second = (y @ v).sum(), (y.sin() @ w).sum()
            del y
            first.backward()
            x.add_(1)
            second.backward()
        return {"x": x, "grads": [w.grad, v.grad]}

    def swap_products(saved: SavedBuffer) -> str:
        return "swap" if "mul" in saved.op else "recompute"

    assert_same_bits(step)
    plain = plain_outcome(step)
    assert run(step, inside_budget(swap_products)) == plain


def test_input_written_between_two_losses_of_one_tensor() -> None:
    """The tensor between is let go of by the other loss only after the input was written."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w, v = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with scope():
            y = x * 2
            first, second = (y @ v).sum(), (y.sin() @ w).sum()
            del y
            x.add_(1)
            first.backward()
            second.backward()
        return {"x": x, "grads": [w.grad, v.grad]}

    def keep_products(saved: SavedBuffer) -> str:
        return "keep" if "mul" in saved.op else "recompute"

    assert_same_bits(step)
    assert run(step, inside_budget(keep_products)) == plain_outcome(step)


def test_nothing_is_held_after_the_losses_are_done() -> None:
    """What was held because its input was overwritten is let go of with the loss that needed it."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with MemoryBudget(UNLIMITED, config=Config(decisions="recompute")) as budget:
        other = (w * 2).pow(2).sum()  # keeps the tape alive
        before_bytes = tracked_bytes()
        y = x * 2
        loss = (y.sin() @ w).sum()
        x.add_(1)
        del y
        torch.autograd.grad(loss, w)
        del loss
        assert tracked_bytes() == before_bytes
        other.backward()
    assert budget.summary().num_recomputed_ops == 2
