"""DistributedDataParallel: gradients that a reducer adds up behind the engine, in two real processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.verdict import KINDS, assert_good, judge

if TYPE_CHECKING:
    from tests.distributed.pair import Pair
    from tests.same_bits.judge import Scope, Step


class Net(nn.Module):
    """A net with batch norm, and a head that every second step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.GELU(),
            nn.Dropout(0.1),
        )
        self.head, self.other = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, *, uses_other: bool) -> torch.Tensor:
        """Compute."""
        hidden = self.body(x).mean((2, 3))
        return self.head(hidden) + (self.other(hidden) if uses_other else 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "no_sync": {},
    "buckets": {"bucket_cap_mb": 0.001, "broadcast_buffers": False},
}


def training(how: str) -> Step:
    """Make a step that trains a wrapped model for four batches."""

    def step(scope: Scope) -> dict[str, Any]:
        model = DistributedDataParallel(Net(), **OPTIONS[how])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(torch.distributed.get_rank())
        losses = []
        with scope():
            for index in range(4):
                accumulates = how == "no_sync" and index % 2 == 0
                with model.no_sync() if accumulates else contextlib.nullcontext():
                    uses_other = how != "unused" or index % 2 == 0
                    loss = model(torch.randn(8, 3, 24, 24), uses_other=uses_other).square().mean()
                    loss.backward()
                losses.append(loss.detach())
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
        return {
            "losses": losses,
            "parameters": [parameter.detach() for parameter in model.parameters()],
            "buffers": list(model.buffers()),
        }

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", OPTIONS)
def test_same_bits(pair: Pair, how: str, kind: str) -> None:
    """Every rank has the plain run's bits, whatever left its memory in between."""
    assert_good(pair.run(judge, f"ddp {how}", training, (how,), kind), kind)
