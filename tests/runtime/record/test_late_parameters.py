"""Parameters whose memory torch did not allocate, as those of a memory-mapped file.

No scan finds them where the scope opens before the model exists, and the allocator does not count them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget
from torchdelta.native.counting import counting_status
from torchdelta.runtime.record import late

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the counter at the allocator")

CONFIG = Config(tier="memory", planner=None)
NUM_LAYERS = 12
WIDTH = 192
SHARE = 0.6


def mapped(layer: nn.Linear) -> nn.Linear:
    """Give a layer parameters in memory of numpy."""
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.from_numpy(np.array(parameter.detach().numpy()))))
    return layer


def train(num_steps: int = 2, *, is_frozen: bool = False) -> list[torch.Tensor]:
    """Make a model and train it. Return losses and parameters.

    Args:
        num_steps: How often.
        is_frozen: Whether only the first layer is trained, whose parameters torch allocates, as those of an adapter.
    """
    torch.manual_seed(0)
    layers = [(mapped(nn.Linear(WIDTH, WIDTH)), nn.GELU()) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*(part for pair in layers for part in pair))
    if is_frozen:
        model[0] = nn.Linear(WIDTH, WIDTH)
        for parameter in model[1:].parameters():
            parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observed: list[torch.Tensor] = []
    for _ in range(num_steps):
        loss = model(torch.randn(512, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        observed.append(loss.detach())
    return [*observed, *(parameter.detach().clone() for parameter in model.parameters())]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether all bits are equal."""
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_the_first_step_stays_in_the_budget(*, is_frozen: bool) -> None:
    """All of them are counted, and room is made, as soon as the forward meets the first."""
    plain = train(is_frozen=is_frozen)
    with MemoryBudget("1TiB", CONFIG) as unlimited:
        train(is_frozen=is_frozen)
    budget_bytes = int(SHARE * unlimited.summary().peak_bytes)
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        assert equal(train(is_frozen=is_frozen), plain)
    assert 0 < budget.summary().peak_bytes <= budget_bytes


def test_scans_for_more_of_them_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that makes such a leaf in each step does not visit all objects of the process in each."""
    num_scans = 0
    scan: Callable[..., int] = late.scan_storages

    def counted(*args: object, **options: object) -> int:
        nonlocal num_scans
        num_scans += 1
        return scan(*args, **options)

    monkeypatch.setattr(late, "scan_storages", counted)
    weight = nn.Parameter(torch.randn(64, 64))
    with MemoryBudget("1TiB", CONFIG):
        running_session().pause.forbid()
        for _ in range(12):
            attacked = torch.from_numpy(np.ones((64, 64), dtype=np.float32)).requires_grad_()
            (attacked @ weight).square().mean().backward()
    assert num_scans == late.MOST_SCANS
