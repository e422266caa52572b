"""The engine adds gradients in place, also into memory that replays read: what a custom Function returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.record.taped import (
    Loop,
    budget_of_usual_steps,
    one_thread_and_the_tape,  # noqa: F401 - a fixture # pyright: ignore[reportUnusedImport]
    outcome,
)


class ReturnsSaved(torch.autograd.Function):
    """The gradient of a product that was computed in the forward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Save the gradient."""
        ctx.save_for_backward(gradient)
        return (y * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return it itself."""
        (gradient,) = ctx.saved_tensors
        return gradient, None


class ReturnsAttribute(torch.autograd.Function):
    """The same, with the gradient as an attribute that is given up."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Keep the gradient."""
        ctx.gradient = gradient
        return (y * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return it itself."""
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


@pytest.mark.parametrize("function", [ReturnsSaved, ReturnsAttribute])
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_what_a_replay_reads_is_not_what_the_engine_has_added_to(function: type[torch.autograd.Function]) -> None:
    """The engine owns the returned tensor alone, and adds the other gradient of `y` to it, in place."""
    used: list[bool] = []

    def body(loop: Loop, _index: int) -> None:
        extra: list[torch.Tensor] = []

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == 0:
                return x
            gradient = (x * 1e-4).detach()
            y = (x + gradient * 2000).sin() + 0.1  # the sum is dropped, and its replay reads the gradient
            x = x + y * 0.5
            extra.append(function.apply(y, gradient) * 1e-3)  # its backward runs first
            return x

        loss = loop.forward(between) + sum(extra)
        used.append(loop.is_on_tape())
        loss.backward()
        loop.update(loss)

    plain, _ = outcome(body, None)
    used.clear()
    seen, _ = outcome(body, budget_of_usual_steps())
    assert any(used)
    assert seen == plain
