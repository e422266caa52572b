"""A custom Function whose backward uses the class of a saved tensor that has a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.taped import Loop, one_thread_and_the_tape, same_bits  # noqa: F401 - a fixture
from torchdelta import Config, MemoryBudget


class Scaled(torch.Tensor):
    """Another class, with a method."""

    def scale(self) -> float:
        """Return a number."""
        return 2.0


class Twice(torch.autograd.Function):
    """Doubles; its backward asks the tensor that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Save the input."""
        ctx.save_for_backward(x)
        return x.as_subclass(torch.Tensor) * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Call the method of the class."""
        (x,) = ctx.saved_tensors
        return gradients[0] * x.scale()


def twice(x: torch.Tensor) -> torch.Tensor:
    """Double a tensor by way of the class."""
    return Twice.apply(x.as_subclass(Scaled) * 1.0)


@pytest.mark.parametrize("pauses", [True, False])
def test_a_class_in_steps_that_fit(*, pauses: bool) -> None:
    """Recording does not pause, and where it may not anyway, each backward is recorded."""

    def train() -> list[str]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(6):
            loss = twice(model(torch.randn(64, 64))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        return losses

    expected = train()
    with MemoryBudget("1TiB", Config(tier="memory")):
        if not pauses:
            running_session().pause.forbid()
        assert train() == expected


@pytest.mark.usefixtures("one_thread_and_the_tape")
@pytest.mark.parametrize("begins_at", [0, 10])
def test_a_class_in_followed_steps(begins_at: int) -> None:
    """Also where the steps before were recorded in part."""

    def body(loop: Loop, index: int) -> None:
        loss = loop.forward(lambda layer, x: twice(x) if layer == 1 and index >= begins_at else x)
        loss.backward()
        loop.update(loss)

    counts = same_bits(body)
    assert (counts[-1] > 0) == (begins_at > 0)
    assert counts[-1] == counts[begins_at]
