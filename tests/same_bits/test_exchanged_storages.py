"""Storages that tensors exchange, free, refill and reload in the middle of a step, where no op is seen of it."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

from tests.same_bits.exchanges import program
from tests.same_bits.judge import UNLIMITED, Scope, differences, inside_budget, run
from tests.sampling import sample
from torchdelta import Config, MemoryBudget

NUM_SEEDS = 24
SHARE_OF_PEAK = 0.98
DEPTH = 14
"""Of the programs under a tight budget: what can leave is most of their memory."""


def inside(budget_bytes: int | str) -> Scope:
    """Make a scope factory with a budget and no forced decisions."""
    return lambda: MemoryBudget(budget_bytes, Config(tier="memory"))


def content_differences(seed: int, scope: Scope, depth: int | None = None) -> list[str]:
    """Name what a program sees otherwise inside a scope than plainly."""
    plain = run(program(seed, depth))
    assert plain.raised is None, plain.message
    return [found for found in differences(plain, run(program(seed, depth), scope)) if not found.endswith("leaked")]


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 6))
def test_random_exchanges_under_a_roomy_budget(seed: int) -> None:
    """A budget that never presses sees the same bits, whatever happens to the storages."""
    assert content_differences(seed, inside(UNLIMITED)) == []


@pytest.mark.parametrize(
    ("seed", "decisions"), sample(itertools.product(range(0, NUM_SEEDS, 3), ["recompute", "swap"]), 7)
)
def test_random_exchanges_under_forced_decisions(seed: int, decisions: str) -> None:
    """Every saved buffer that can leave leaves, and comes back with its own content."""
    assert content_differences(seed, inside_budget(decisions)) == []


@pytest.mark.parametrize("seed", sample(range(1, NUM_SEEDS, 3), 4))
def test_random_exchanges_under_a_tight_budget(seed: int) -> None:
    """Below the peak of a budget that never presses, buffers have to leave, and nothing that is seen changes."""
    made: list[MemoryBudget] = []

    def scope(budget_bytes: int | str) -> MemoryBudget:
        made.append(MemoryBudget(budget_bytes, Config(tier="memory")))
        return made[-1]

    gc.collect()
    program(seed, DEPTH)(lambda: scope(UNLIMITED))
    gc.collect()
    budget_bytes = int(SHARE_OF_PEAK * made[0].summary().peak_bytes)
    assert content_differences(seed, lambda: scope(budget_bytes), DEPTH) == []
    summary = made[1].summary()
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert summary.peak_bytes <= budget_bytes


@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU])
def test_gradients_that_are_offloaded_in_their_hook(width: int, activation: type[nn.Module]) -> None:
    """A hook that takes each gradient away and leaves an empty tensor frees storages that no op frees."""

    def step(scope: Scope) -> dict[str, list[torch.Tensor]]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), activation()) for _ in range(5)])
        seen: list[torch.Tensor] = []

        def offload(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad.data = torch.empty(0)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(offload)
        with scope():
            for _ in range(5):
                model(torch.randn(width, width)).sum().backward()
                model.zero_grad()
        return {"gradients": seen}

    assert differences(run(step), run(step, inside(UNLIMITED))) == []
