"""Whole training loops of several kinds of model: the plain run's bits, forced and under a budget that presses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from benchmarks.networks.language import GPT2
from benchmarks.networks.vision import Bottleneck
from tests.same_bits.judge import DEVICE, Scope, Step, assert_same_bits, least_budget_from, run, state_of
from torchdelta import Config, MemoryBudget
from torchdelta._torch.device import allocator_statistics, reset_allocator_peak

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.accelerator
NUM_STEPS = 3
# Small enough to be quick on the stand-in, whose kernels are the CPU's.
SCALE = 4 if DEVICE == "cuda" else 1


class Experts(nn.Module):
    """A mixture of experts: each row goes to two of four, by sums into rows chosen by index."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route, and add up."""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return x + out


class Attention(nn.Module):
    """Attention by hand, with dropout on its weights, and a causal mask that the host makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and add."""
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], device="cpu").tril().to(x.device) == 0
        weights = (q @ k.transpose(1, 2) / 8).masked_fill(mask, float("-inf")).softmax(-1)
        return x + F.dropout(weights, 0.1) @ v


def language_model() -> Any:
    """Make a GPT-2 of two blocks; dropout, tied weights, the library's own attention."""
    model = GPT2(2, 32 * SCALE, 2, 128, 64)
    return lambda: (model(torch.randint(0, 128, (4, 64))), model)


def pictures() -> Any:
    """Make a small ResNet; batch norm, in-place activations, convolutions."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), Bottleneck(16, 8 * SCALE, 1),
        Bottleneck(32 * SCALE, 8 * SCALE, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32 * SCALE, 10),
    )  # fmt: skip
    return lambda: (F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,))), model)


def experts() -> Any:
    """Make a mixture of experts, two layers."""
    model = nn.Sequential(
        nn.Linear(32 * SCALE, 32 * SCALE), Experts(32 * SCALE), nn.LayerNorm(32 * SCALE), Experts(32 * SCALE)
    )
    return lambda: (model(torch.randn(128, 32 * SCALE)).pow(2).mean(), model)


def attention() -> Any:
    """Make two layers of attention by hand."""
    model = nn.Sequential(Attention(64), nn.GELU(), Attention(64), nn.LayerNorm(64))
    return lambda: (model(torch.randn(4, 64, 64)).pow(2).mean(), model)


MODELS: dict[str, Callable[[], Any]] = {
    "language-model": language_model, "pictures": pictures, "experts": experts, "attention": attention,
}  # fmt: skip


def loop(name: str, peaks: list[int] | None = None, **options: Any) -> Step:
    """Return a training loop; `peaks` takes the allocator's active bytes at the highest of each step."""

    def step(scope: Scope) -> dict[str, Any]:
        compute = MODELS[name]()
        _, model = compute()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        device = torch.device(DEVICE, 0)
        losses = []
        if peaks is not None:
            peaks.clear()
        with scope():
            for _ in range(NUM_STEPS):
                reset_allocator_peak(device)
                loss, _ = compute()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                del loss
                statistics = allocator_statistics(device)
                assert statistics is not None
                if peaks is not None:
                    peaks.append(statistics["peak"])
        return state_of(model, losses=losses)

    return step


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", MODELS)
def test_every_decision_leaves_the_plain_bits(name: str) -> None:
    """Recomputed, swapped and mixed, for each kind of model."""
    assert_same_bits(loop(name))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_every_way_of_stepping(options: dict[str, bool]) -> None:
    """AdamW with one kernel, by lists, and one by one."""
    assert_same_bits(loop("attention", **options))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("policy", ["torchdelta", "recompute-only", "swap-only"])
@pytest.mark.parametrize("name", ["language-model", "pictures", "attention"])
def test_a_budget_that_presses(name: str, policy: str) -> None:
    """The plain bits, evictions, and active bytes inside the budget from the second step on."""
    peaks: list[int] = []
    plain = run(loop(name, peaks))
    run(loop(name, peaks))  # again: the first has filled the libraries' workspaces
    statistics = allocator_statistics(torch.device(DEVICE, 0))
    assert statistics is not None
    resident_bytes = statistics["current"]  # of other tests and libraries: no budget moves them
    budget_bytes = resident_bytes + int(0.8 * (max(peaks) - resident_bytes))
    budgets: list[MemoryBudget] = []
    config = Config(policy=policy, tier="memory")
    if DEVICE == "cuda":
        budget_bytes = least_budget_from(loop(name), budget_bytes, config)

    def pressed() -> MemoryBudget:
        budgets.append(MemoryBudget(budget_bytes, config))
        return budgets[-1]

    ours = run(loop(name, peaks), pressed)
    assert ours.message == ""
    assert ours.observed == plain.observed
    summary = budgets[-1].summary()
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert max(peaks[1:]) <= budget_bytes
