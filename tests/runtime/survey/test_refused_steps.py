"""A step that the budget refused is no step of the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.runtime.programs import running
from torchdelta import BudgetError, MemoryBudget

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 128
FEW_ROWS = 8
TOO_MANY_ROWS = 4096
ROOM_BYTES = 1500 * 1024


def base_bytes() -> int:
    """Count what lives already, tensors of other tests included."""
    with running() as (_, session):
        return session.ledger.usage.total_bytes


def loss_of(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Compute a loss whose graph is far too large for the budget at many rows."""
    z = torch.ones(num_rows, WIDTH) @ weight
    for _ in range(12):
        z = torch.sin(z) @ weight
    return z.sum()


def check(budget: MemoryBudget, *, num_steps: int, num_refused: int) -> None:
    """Compare a summary with what was trained, and its peaks with the budget."""
    summary = budget.summary()
    assert [step.index for step in summary.steps] == list(range(num_steps))
    assert summary.num_refused_steps == num_refused
    assert f"; {num_steps} step{'s' * (num_steps != 1)}, {num_refused} refused" in str(summary).splitlines()[0]
    assert summary.budget_bytes is not None
    assert all(step.peak_bytes <= summary.budget_bytes for step in summary.steps)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("reads_loss", [True, False])
def test_refused_steps_among_others(*, with_optimizer: bool, reads_loss: bool) -> None:
    """The first, one in the middle and the last are refused, in a backward or where the loss is read before it."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with running(base_bytes() + ROOM_BYTES) as (budget, _):
        for num_rows in (TOO_MANY_ROWS, FEW_ROWS, TOO_MANY_ROWS, FEW_ROWS, FEW_ROWS, TOO_MANY_ROWS):
            weight.grad = None
            if num_rows == TOO_MANY_ROWS:
                with pytest.raises(BudgetError):
                    (loss_of(weight, num_rows).item() if reads_loss else loss_of(weight, num_rows).backward())
                continue
            loss_of(weight, num_rows).backward()
            if with_optimizer:
                optimizer.step()
    check(budget, num_steps=3, num_refused=3)


def test_a_scope_in_which_every_step_was_refused() -> None:
    """It does not say that it saw no step on its thread."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    with running(base_bytes() + ROOM_BYTES) as (budget, _), pytest.raises(BudgetError):
        loss_of(weight, TOO_MANY_ROWS).backward()
    check(budget, num_steps=0, num_refused=1)
    assert "no training step" not in str(budget.summary())


def test_a_refused_step_of_the_optimizer() -> None:
    """No step while it is refused; if room is made and it steps again, that completes the step."""
    model = nn.Linear(512, 512, bias=False)
    x = torch.ones(4, 512)
    sgd, adam = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), lr=0.1)
    with running(base_bytes() + 3 * 512 * 512 * 4) as (budget, _):
        ballast = torch.ones(512, 512)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            with pytest.raises(BudgetError):
                adam.step()
        assert not budget.summary().steps
        sgd.step()
        del ballast
    check(budget, num_steps=1, num_refused=2)


def test_a_step_that_had_ended_before_the_refused_one_counts() -> None:
    """Without an optimizer the next forward ends a step, also where its first op is refused."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    with running(base_bytes() + ROOM_BYTES) as (budget, _):
        loss_of(weight, FEW_ROWS).backward()
        with pytest.raises(BudgetError):
            (torch.ones(16 * TOO_MANY_ROWS, WIDTH) @ weight).sum().backward()
    check(budget, num_steps=1, num_refused=1)


def test_a_refused_update_by_hand() -> None:
    """What a program computes from the gradients, without an optimizer, belongs to the step."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    with running(base_bytes() + ROOM_BYTES) as (budget, _):
        loss_of(weight, FEW_ROWS).backward()
        assert weight.grad is not None
        with torch.no_grad(), pytest.raises(BudgetError):
            torch.kron(weight.grad, torch.ones(8, 8))
    check(budget, num_steps=0, num_refused=1)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_refused_step_replaces_no_saved_file(tmp_path: Path, new_format: bool) -> None:
    """`torch.save` raises the error before it opens its file, and the error leaves the scope as it is."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    path = tmp_path / "checkpoint.pt"

    def save(loss: torch.Tensor) -> None:
        torch.save({"weight": weight, "loss": loss.detach()}, path, _use_new_zipfile_serialization=new_format)

    with running(base_bytes() + ROOM_BYTES) as (budget, _):
        loss = loss_of(weight, FEW_ROWS)
        save(loss)
        loss.backward()
        before = path.read_bytes()
        with pytest.raises(BudgetError) as raised:
            save(loss_of(weight, TOO_MANY_ROWS))
        assert path.read_bytes() == before
        loss_of(weight, FEW_ROWS).backward()
        save(weight.sum())
    assert raised.value.is_lower_bound
    assert torch.load(path)["weight"].equal(weight)
    check(budget, num_steps=2, num_refused=1)


@pytest.mark.parametrize("name", ["apply_", "map_", "map2_"])
def test_a_refused_step_writes_no_tensor_without_an_op(name: str) -> None:
    """It raises the error before the write: nothing would undo it."""
    weight = torch.full((WIDTH, WIDTH), 1e-3, requires_grad=True)
    count = torch.zeros(4)
    others = {"apply_": 0, "map_": 1, "map2_": 2}[name] * (torch.ones(4),)
    with running(base_bytes() + ROOM_BYTES) as (budget, _):
        loss = loss_of(weight, TOO_MANY_ROWS)
        with pytest.raises(BudgetError):
            getattr(count, name)(*others, lambda *_: 1.0)
        assert count.tolist() == [0.0] * 4
        del loss
        loss_of(weight, FEW_ROWS).backward()
    check(budget, num_steps=1, num_refused=1)
