"""A survey that begins before the forward: what a data loader reads has its values, so the step is seen to its end."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.record.scan import count_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = Config(tier="memory")


def held_bytes() -> int:
    """Return the bytes of the tensors that exist."""
    gc.collect()
    return count_tensors(torch.device("cpu"))


def language_model() -> tuple[nn.Module, Callable[[nn.Module], float]]:
    """Return a model of 300 KiB, and a function that trains it on batches in a drawn order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 96), nn.Linear(96, 512), nn.GELU(), nn.Linear(512, 64))
    rows = torch.arange(32 * 16).reshape(32, 16) % 64

    def train(model: nn.Module) -> float:
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters())
        loss = torch.zeros(())
        for (tokens,) in DataLoader(TensorDataset(rows), batch_size=16, shuffle=True):
            num_tokens = (tokens != 63).sum().item()  # read before the forward, as Trainer does
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum") / num_tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return model, train


def test_a_budget_below_the_parameters_names_what_the_run_needs() -> None:
    """In one error, which is no lower bound, and with which the run then fits."""
    model, train = language_model()
    expected = train(model)
    del model, train
    model, train = language_model()
    with pytest.raises(BudgetError) as caught, MemoryBudget(held_bytes() - 1000, CONFIG):
        train(model)
    assert not caught.value.is_lower_bound
    least_bytes = caught.value.least_budget_bytes
    del caught, model, train
    gc.collect()
    model, train = language_model()
    with MemoryBudget(least_bytes, CONFIG) as budget:
        assert train(model) == expected
    assert budget.summary().peak_bytes <= least_bytes


def test_what_was_not_written_is_not_read() -> None:
    """A counter that the survey left alone has no value to read: the error says that it knows a lower bound only."""
    held = torch.zeros(1024)
    counter = torch.zeros((), dtype=torch.int64)
    seen: list[float] = []

    def count() -> None:
        kept = torch.ones(64, 64)  # the survey begins
        seen.append(counter.item())
        counter.add_(1)
        seen.append(counter.item())
        del kept

    with pytest.raises(BudgetError) as caught, MemoryBudget(held_bytes() - held.nbytes // 2, CONFIG):
        count()
    assert seen == [0]
    assert caught.value.is_lower_bound
    assert counter.item() == 0


def test_large_results_take_no_memory() -> None:
    """They stay fake, so that a refused step takes a mebibyte more at most."""
    held = torch.zeros(1024)
    kept: list[torch.Tensor] = []

    def read_all() -> None:
        kept.append(torch.ones(64, 64))  # the survey begins
        kept.extend(torch.arange(2**14) for _ in range(16))  # 128 KiB each
        for tensor in kept:
            tensor.sum().item()

    with pytest.raises(BudgetError), MemoryBudget(held_bytes() - held.nbytes // 2, CONFIG):
        read_all()
    assert len(kept) == 17
    assert sum(tensor.nbytes for tensor in kept[1:] if type(tensor) is torch.Tensor) == 2**20


def test_generators_have_their_states_from_before_the_survey() -> None:
    """Orders that are drawn in a survey differ between its reads, and leave no trace in what is drawn after it."""
    own = torch.Generator().manual_seed(3)
    states: list[torch.Tensor] = []
    orders: list[list[int]] = []

    def draw() -> None:
        torch.randperm(8)  # before the survey: it stays drawn
        states.extend([torch.get_rng_state(), own.get_state()])
        kept = torch.ones(64, 64)  # the survey begins
        orders.extend(torch.randperm(8).tolist() for _ in range(2))
        orders.append(torch.randperm(8, generator=own).tolist())
        orders.append(torch.arange(8).random_(0, 100).tolist())
        raise InterruptedError(str(kept.shape))

    with pytest.raises(BudgetError), MemoryBudget(held_bytes() + 2**13, CONFIG), pytest.raises(InterruptedError):
        draw()
    assert len(orders) == 4
    assert orders[0] != orders[1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])
