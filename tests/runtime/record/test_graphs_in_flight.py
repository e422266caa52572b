"""Pipelines: the backward of a batch runs after the forward of later ones, so that graphs of several steps live."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import NUM_LAYERS, ROWS, WIDTH, Stack, following
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget

NUM_STEPS = 24


def train(num_in_flight: int, num_batches: int, num_steps: int) -> list[str]:
    """Train with micro-batches whose graphs wait for their backward. Return the bits after each step."""
    stack = Stack()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for _ in range(num_steps):
        waiting: list[torch.Tensor] = []
        for _ in range(num_batches):
            x = torch.randn(ROWS, WIDTH)
            for index in range(NUM_LAYERS):
                x = stack.block(index, x)
            waiting.append(x.square().mean())
            if len(waiting) == num_in_flight:
                waiting.pop(0).backward()
        while waiting:
            waiting.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits_of(stack.state_dict()))
    return seen


@pytest.mark.parametrize("share", [0.8, 0.9])
@pytest.mark.parametrize(("num_in_flight", "num_batches"), [(2, 3), (2, 4), (3, 3), (3, 4)])
def test_ops_of_an_earlier_step_may_be_replayed_while_an_outline_is_learned(
    num_in_flight: int, num_batches: int, share: float
) -> None:
    """Their positions are those of another step."""
    seed_everything()
    plain = train(num_in_flight, num_batches, NUM_STEPS)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(num_in_flight, num_batches, 2)
    budget_bytes = int(unlimited.summary().peak_bytes * share)
    seed_everything()
    with following(budget_bytes) as budget:
        session = running_session()
        assert train(num_in_flight, num_batches, NUM_STEPS) == plain
        assert session.follower.num_followed_steps
    assert all(step.peak_bytes <= budget_bytes for step in budget.summary().steps)
