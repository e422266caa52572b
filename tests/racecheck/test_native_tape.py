"""What replays on the native tape read, while the program writes on a stream of its own."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.accelerator.watch import StandinWatch
from tests.following import following_drawn
from tests.racecheck.paths import AT_ONCE, DRAWN, LEAST_BYTES
from tests.runtime.parts import running_session
from torchdelta.native.build import status_before_use
from torchdelta.native.gate import load_gate
from torchdelta.native.saved_hooks import MODULE
from torchdelta.native.tape import load_tape
from torchdelta.runtime.device import accelerator

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench, Scope

pytestmark = [
    pytest.mark.racecheck,
    pytest.mark.skipif(not status_before_use(MODULE, "").is_on, reason="needs the native parts"),
]
NUM_STEPS = 10
ONLY_RECOMPUTES = 0  # a seed with which everything that the drawn plan takes goes to the native tape


class Refill(torch.autograd.Function):
    """Fills the buffer of a network on the network's side stream, in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, network: RefilledInBackward) -> torch.Tensor:
        """Do nothing."""
        ctx.network = network
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Fill the buffer with the next input."""
        network = ctx.network
        network.side.wait_stream(torch.accelerator.current_stream())
        with network.side:
            network.buffer.copy_(network.next_input)
        return gradients[0] * 1, None


class RefilledInBackward(nn.Module):
    """A network whose backward fills the buffer that its forward has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)
        self.buffer = nn.Buffer(torch.zeros(128, 32), persistent=False)
        self.side = torch.Stream()
        self.next_input = self.buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the buffer, which has the input of the last call."""
        torch.accelerator.current_stream().wait_stream(self.side)
        self.next_input = x
        return Refill.apply(self.second((self.first(self.buffer * 2 + 1) * self.buffer.exp()).sin()), self)


def train(bench: Bench, scope: Scope, seed: int) -> tuple[list[bytes], int]:
    """Train. Return the bits of the parameters, and the number of steps on the native tape."""
    bench.extension.set_mode(AT_ONCE, seed)
    torch.manual_seed(0)
    network = RefilledInBackward().to(bench.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    inputs = [torch.randn(128, 32, device=bench.device) for _ in range(NUM_STEPS)]
    bench.extension.set_mode(DRAWN, seed)
    gc.disable()
    num_native = 0
    try:
        with scope as budget:
            for x in inputs:
                network(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if budget is not None:
                lane = running_session().partial.lane
                num_native = lane.num_steps if lane is not None else 0
    finally:
        gc.enable()
    return [parameter.detach().cpu().numpy().tobytes() for parameter in network.parameters()], num_native


def test_a_buffer_that_backward_fills_on_another_stream(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays read the old content: it is copied on the home stream, and the other stream waits for the copy."""
    monkeypatch.setattr(accelerator, "new_watch", StandinWatch)
    load_tape()
    load_gate()
    with bench.schedule(0) as (found, _):
        expected, _ = train(bench, contextlib.nullcontext(), 0)
    assert found == []
    for seed in range(4):
        with (
            bench.schedule(seed) as (found, _),
            mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", LEAST_BYTES),
        ):
            bits, num_native = train(bench, following_drawn(ONLY_RECOMPUTES, tier="memory"), seed)
        assert found == []
        assert bits == expected
        assert num_native > 0
