"""What is dropped can be recomputed in the budget; what could not be is swapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.parts import buffer_of
from tests.runtime.programs import UNLIMITED, running
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.modes import Quietly
from torchdelta.runtime.memory.costs import Costs
from torchdelta.runtime.memory.replay_peaks import ExpectedGradients, ReplayPeaks, replay_peak_bytes
from torchdelta.runtime.policies import REGISTRY
from torchdelta.runtime.policies.base import Action

if TYPE_CHECKING:
    from collections.abc import Callable


_MIB = 1 << 20
_SMALL_BYTES = 1 << 16


class _WideFeatures(nn.Module):
    """Layers over features of which each passes through a wide result that needs no gradient.

    In the forward there is room for the wide results. In the backward there are gradients in its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for index, layer in enumerate(self.layers):
            total = total + layer((x + index).repeat(8, 1, 1).sin_().sum(0)).tanh().mean()
        return total


def _gradients(budget: int | str, policy: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model, x = _WideFeatures(), torch.randn(1024, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryBudget(budget, config=Config(policy=policy, planner=None)):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", [name for name, make in REGISTRY.items() if make().may_swap])
def test_replays_that_would_not_fit_are_avoided(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a budget in which copies fit beside the gradients, and replays do not, training gives plain's gradients."""
    monkeypatch.setattr(Costs, "swap_time_s", lambda *_: 1e3)  # copies are so slow that each policy would recompute
    mine = _gradients(36 * _MIB, policy)
    assert mine
    assert all(map(torch.equal, mine, _gradients(UNLIMITED, policy)))


def test_recompute_only_does_not_swap() -> None:
    """A policy that the user has chosen to spare the disk drops what it can, even where replays may not fit."""
    with pytest.raises(BudgetError, match=r" 0 B swapped out, \d+\.\d+ MiB dropped"):
        _gradients(36 * _MIB, "recompute-only")


_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tanh": lambda a, _: a.tanh(),
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "in place": lambda a, _: (a * 2).relu_(),
    "two outputs": lambda a, b: torch.frexp(a)[0] + b,
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(sorted(_OPS)), st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_peak_of_a_replay_is_what_it_takes(steps: list[tuple[str, int, int]], are_swapped: list[bool]) -> None:
    """In free memory of that size, the last result of a random program is recomputed, and the replay uses it."""
    x = torch.randn(1 << 18, requires_grad=True)
    with running() as (_, session):
        results, roots = [x], []
        for name, first, second in steps:
            result = _OPS[name](results[first % len(results)], results[second % len(results)])
            roots.append(result.sin())  # saves its argument
            results.append(result)
        buffers = [buffer_of(session, result) for result in results[1:]]
        del results, result
        room, target = session.room, buffers[-1]
        for buffer, is_swapped in zip(buffers, are_swapped, strict=False):
            room.evict(buffer, Action.SWAP if is_swapped and buffer is not target else Action.RECOMPUTE)
        room.transfers.drain()
        expected_bytes = replay_peak_bytes(target)
        usage = session.ledger.usage
        usage.restart_peak()
        start_bytes = usage.total_bytes
        room.budget_bytes = start_bytes + expected_bytes + _SMALL_BYTES
        with Quietly():
            storage = session.restorer.bring(target)
        assert storage.nbytes() == target.size_bytes
        assert start_bytes + expected_bytes - _SMALL_BYTES <= usage.peak_bytes <= room.budget_bytes


def test_expected_gradients_are_those_of_this_scope() -> None:
    """A gradient is expected once its optimizer's model has run, until it exists; a frozen parameter has none."""
    model, other = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    model[0].requires_grad_(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    with running() as (_, session):
        expected = ExpectedGradients(session.ledger)
        loss = model(torch.randn(8, 64)).sum()
        last_bytes = sum(p.nbytes for p in model[1].parameters())
        assert expected.size_bytes() == last_bytes
        loss.backward()
        assert expected.size_bytes() == 0
        optimizers[0].zero_grad()
        assert expected.size_bytes() == last_bytes


def test_inputs_that_the_program_holds_take_nothing() -> None:
    """A replay that reads a part of a large batch allocates only its results."""
    batch = torch.randn(1 << 22)
    weight = torch.ones(1, requires_grad=True)
    with running() as (_, session):
        result = (batch[: 1 << 18] * weight).add(1.0)
        buffer = buffer_of(session, result)
        saved = result.sin()
        assert 2 * _MIB <= replay_peak_bytes(buffer) < 2 * _MIB + _SMALL_BYTES
        del saved, result


def test_readers_are_forgotten() -> None:
    """While one graph stays open, what is remembered of dropped buffers does not grow from step to step."""
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]), torch.randn(2048, 64)
    replays = ReplayPeaks()
    sizes = []
    with running() as (_, session):
        kept = model(x).sum()  # its graph stays
        for _ in range(60):
            loss = model(x).sum()
            for buffer in list(session.ledger.held.values()):
                if session.room.is_evictable(buffer) and replays.may_drop(buffer, 1 << 40):
                    session.room.evict(buffer, Action.RECOMPUTE)
            loss.backward()
            sizes.append(len(replays._readers))  # noqa: SLF001 - its growth is what is asked for
        kept.backward()
    assert max(sizes) > 0
    assert max(sizes[30:]) <= max(512, *sizes[:30])
