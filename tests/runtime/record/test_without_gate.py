"""Where recording in part is not possible, followed steps are recorded as a whole."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from tests.following import following_drawn
from tests.runtime.parts import running_session
from torchdelta.errors import NativeError
from torchdelta.native.counting import counting_status

NUM_STEPS = 10


def train() -> list[torch.Tensor]:
    """Train a small network and return its parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        net(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")
def test_without_the_module() -> None:
    """Steps follow their program, none is recorded in part, and the bits are plain's."""
    plain = train()
    none = NativeError("there is no compiler")
    with (
        mock.patch("torchdelta.runtime.record.partial_conditions.load_gate_soon", return_value=none),
        following_drawn() as budget,
    ):
        running_session().pause.forbid()
        followed = train()
        num_partial = running_session().partial.num_steps
    follow = budget.summary().follow
    assert follow is not None
    assert follow.num_followed_steps >= NUM_STEPS - 3
    assert num_partial == 0
    assert all(map(torch.equal, plain, followed))
