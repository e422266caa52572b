"""The region on CUDA: tensors of a step, of autograd's threads too, come from its segment; the bits are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchdelta import Config, MemoryBudget
from torchdelta.arena.region import Region
from torchdelta.runtime.current import current_session

pytestmark = pytest.mark.cuda


def _train(config: Config) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, num_segments = [], 0
    with MemoryBudget("8GiB", config):
        for _ in range(4):
            loss = model(torch.randn(16384, 512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        session = current_session()
        assert session is not None
        if isinstance(session.placing, Region):
            assert session.placing.pool is not None
            torch.cuda.reset_accumulated_memory_stats()
            model(torch.randn(16384, 512)).square().mean().backward()
            num_segments = torch.cuda.memory_stats()["segment.large_pool.allocated"]
    return losses, num_segments


def test_a_step_lives_in_one_segment() -> None:
    """No segment is added by a step whose region was made, and what is trained is what is trained without."""
    plain, _ = _train(Config(tier="memory"))
    placed, num_segments = _train(Config(tier="memory", arena=True))
    assert num_segments == 0
    assert [loss.item() for loss in placed] == [loss.item() for loss in plain]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1 << 30  # the region has gone with its last tensor
