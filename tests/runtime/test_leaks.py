"""What is held must be let go when nothing depends on it any more, also where no handle ever dies last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.programs import mlp, running
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.fake import FakeTensorMode


def batch() -> torch.Tensor:
    """A batch from a data loader: no recorded op made it."""
    return torch.from_numpy(np.ones((64, 64), np.float32))


def test_small_saved_tensors_do_not_leak_gradients() -> None:
    """All saved tensors are below the least eviction size, so no handle is ever made and the ledger is never cut."""
    model, x = mlp(64, 2), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with running() as (_, session):
        seen = []
        for _ in range(6):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((session.ledger.usage.live_bytes, len(session.ledger.held)))
    assert seen[5] == seen[2]


def test_frozen_model_with_gradients_on_does_not_leak_inputs() -> None:
    """Inference without no_grad: nothing is saved."""
    model = mlp(64, 2).requires_grad_(False)
    with running() as (_, session):
        seen = []
        for _ in range(6):
            model(batch())
            seen.append((session.ledger.usage.live_bytes, len(session.ledger.held)))
    assert seen[5] == seen[2]


def test_a_graph_that_somebody_keeps_does_not_leak_later_inputs() -> None:
    """One handle stays alive, so the number of handles never comes to zero."""
    model = mlp(64, 2)
    with running() as (_, session):
        kept = model(batch())
        seen = []
        for _ in range(6):
            model(batch()).sum().backward()
            model.zero_grad()
            seen.append((session.ledger.usage.live_bytes, len(session.ledger.held)))
        del kept
    assert seen[5] == seen[2]


def test_kept_bytes_are_counted() -> None:
    """What was saved and never left is kept."""
    x = torch.randn(64, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions="keep")) as budget:
        (x * 2).sin().sum().backward()
    assert budget.summary().kept_bytes == x.nbytes


def test_copy_before_write_with_a_full_tier() -> None:
    """preserve() reserves on the tier without a way out: TierFullError where a clone would do."""
    constant = torch.ones(256, 256)
    x = torch.randn(256, 256, requires_grad=True)
    with running(decisions="recompute", host_budget=1024):
        y = (x + constant).sin()
        constant.mul_(3)
        y.sum().backward()
    assert torch.equal(x.grad, (x.detach() + 1).cos())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides it where it is no error
def test_a_survey_leaves_nothing_in_caches_of_torch() -> None:
    """Torch remembers what it found out about fake tensors for ever; each impossible batch would add to it."""
    model = mlp(64, 2)
    for rows in (400, 500):
        before = len(FakeTensorMode.cache)
        with pytest.raises(BudgetError), MemoryBudget("300KiB", Config(tier="memory")):
            model(torch.randn(rows, 64)).sum().backward()
        assert len(FakeTensorMode.cache) == before


def test_batches_of_a_data_loaders_workers_are_let_go() -> None:
    """Each comes in shared memory, and an op puts a tensor on that: nothing may remember the storage."""
    loader = torch.utils.data.DataLoader(torch.randn(64, 4096), batch_size=8, num_workers=1)
    model = mlp(4096, 1)
    with running() as (_, session):
        seen = []
        for x in loader:
            model(x).sum().backward()
            model.zero_grad()
            seen.append((session.ledger.usage.live_bytes, len(session.recorder.needs.learned)))
    assert seen[7] == seen[2]


def test_generators_made_anew_are_let_go() -> None:
    """One generator for each step is no reason to learn the same op again each time."""
    x = torch.ones(64, 64)
    with running() as (_, session):
        seen = []
        for seed in range(6):
            x.normal_(generator=torch.Generator().manual_seed(seed))
            seen.append(len(session.recorder.needs.learned))
    assert seen[5] == seen[0]


def test_a_graph_that_somebody_keeps_does_not_keep_later_copies() -> None:
    """Inputs of later steps leave the tier when their graphs are gone."""
    weight = torch.randn(64, 64, requires_grad=True)
    used_bytes: list[int] = []
    with running(decisions="swap") as (_, session):
        kept = weight * batch()
        for _ in range(6):
            (weight * batch()).sum().backward()
            used_bytes.append(session.room.transfers.tier.used_bytes)
    assert used_bytes[-1] <= used_bytes[1]
    del kept


def test_an_in_place_op_that_raises_loses_nothing() -> None:
    """Shapes that do not fit: eager has not written, and a saved tensor is what it was."""
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with running():
        y = weight * x
        with pytest.raises(RuntimeError, match="size"):
            x.add_(torch.randn(3))
        y.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x)
