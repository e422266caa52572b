"""The first step of SGD with momentum, whose optimizer stores its states only when all of them are made."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from torchdelta import Config, MemoryBudget

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, DEPTH = 512, 16  # parameters of 1 MiB
NUMBERS_BYTES = 64


def _train(budget: int | None, *, foreach: bool, fused: bool) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach, fused=fused)

    def steps() -> None:
        for _ in range(3):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        steps()
    else:
        with MemoryBudget(budget, Config(decision_class="all", planner=None, tier="disk")) as scope:
            steps()
        assert len(scope.summary().steps) == 3
        # The first step begins with all parameters. Tensors that ops make of numbers are not known before.
        assert max(step.peak_bytes for step in scope.summary().steps[1:]) <= budget + NUMBERS_BYTES
    states = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    gc.collect()
    return [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *states)]


@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
def test_a_first_step_below_the_parameters(how: str) -> None:
    """Momentum buffers leave while the others are made."""
    options = {"foreach": how == "foreach", "fused": how == "fused"}
    expected = _train(None, **options)
    assert _train(10 << 20, **options) == expected
