"""After an impossible budget everything that was alive before works as if nothing had happened."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.runtime.programs import running
from tests.sampling import sample
from torchdelta import BudgetError

WIDTH = 128
NUM_ROWS = 256
TOO_MANY_ROWS = 1024
POLICIES = ["torchdelta", "swap-only", "recompute-only"]
# Above what lives already: from hardly more than the losses need to well below what the failing step needs.
ROOM_KIB = [900, 1200, 1500, 1800]


def build(num_losses: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a trained weight, and losses whose graphs save contents with and without an op."""
    torch.manual_seed(num_losses)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    losses = []
    for index in range(num_losses):
        x = torch.randn(NUM_ROWS, WIDTH)  # no op can make it again
        losses.append(((x @ weight).sin() * (index + 1)).square().sum())
    return weight, losses


def deep(weight: torch.Tensor, num_rows: int, *, backward_first: bool = False) -> None:
    """Train through a graph that is far too large for the budget at many rows."""
    z = torch.ones(num_rows, WIDTH) @ weight
    for _ in range(24):
        z = torch.sin(z) @ weight
        if backward_first:
            z = z.square().sigmoid()
    z.sum().backward()


def read_early(weight: torch.Tensor) -> float:
    """Ask for the value of a loss that is too large for the budget."""
    z = torch.ones(4 * TOO_MANY_ROWS, WIDTH) @ weight
    for _ in range(24):
        z = torch.sin(z) @ weight
    return z.sum().item()


def gradients(weight: torch.Tensor, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of each loss by itself, the last one first."""
    found = []
    while losses:
        losses.pop().backward()
        assert weight.grad is not None
        found.append(weight.grad)
        weight.grad = None
    return found


def base_bytes() -> int:
    """Count what lives already, tensors of other tests included."""
    with running() as (_, session):
        return session.ledger.usage.total_bytes


@pytest.mark.parametrize(("num_losses", "policy"), sample(itertools.product([1, 3], POLICIES), 2))
def test_graphs_that_lived_before_work_after_a_budget_error(num_losses: int, policy: str) -> None:
    """Several losses survive a step that fails among them: same gradients, same weight, whatever had left by then."""
    plain = gradients(*build(num_losses))
    num_failed = 0
    for room_kib in ROOM_KIB:
        with running(base_bytes() + room_kib * 1024, policy=policy):
            try:
                weight, losses = build(num_losses)
            except BudgetError:
                continue  # too tight for the losses themselves
            before = weight.detach().clone()
            with pytest.raises(BudgetError):
                deep(weight, TOO_MANY_ROWS)
            num_failed += 1
            assert weight.grad is None
            assert torch.equal(weight, before)
            found = gradients(weight, losses)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))
        del weight, losses, before, found
    assert num_failed


@pytest.mark.parametrize("policy", POLICIES)
def test_a_smaller_batch_trains_in_the_same_scope_after_a_budget_error(policy: str) -> None:
    """The remedy that the error names works at once, several times, and gives the plain bits."""
    weight, _ = build(1)
    deep(weight, 8)
    plain = weight.grad
    assert plain is not None
    del weight
    with running(base_bytes() + 1000 * 1024, policy=policy):
        weight, losses = build(1)
        for attempt in range(3):
            with pytest.raises(BudgetError):
                deep(weight, TOO_MANY_ROWS, backward_first=attempt % 2 == 1)
            weight.grad = None
            deep(weight, 8)
            assert torch.equal(weight.grad, plain)  # pyright: ignore[reportArgumentType]
        weight.grad = None
        assert len(gradients(weight, losses)) == 1


def test_a_loss_read_before_its_backward_leaves_other_graphs_alone() -> None:
    """A survey that is ended by `.item()` restores as much as one that is ended by the backward."""
    plain = gradients(*build(2))
    with running(base_bytes() + 1300 * 1024):
        weight, losses = build(2)
        with pytest.raises(BudgetError):
            read_early(weight)
        found = gradients(weight, losses)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


def test_watching_goes_on_as_before_after_a_budget_error() -> None:
    """Which classes of tensors are plain, how ops run, the budget and the counting are as they were."""
    with running(base_bytes() + 1300 * 1024) as (_, session):
        weight, losses = build(1)
        usage, room = session.ledger.usage, session.room
        before = (session.saved.plain_types, session.recorder.execute, room.budget_bytes, usage.is_counting)
        live_bytes, num_handles = usage.live_bytes, session.ledger.num_handles
        with pytest.raises(BudgetError):
            deep(weight, TOO_MANY_ROWS)
        assert (session.saved.plain_types, session.recorder.execute, room.budget_bytes, usage.is_counting) == before
        assert session.survey is None
        assert not session.ledger.surveys
        assert session.ledger.num_handles == num_handles
        assert usage.live_bytes <= live_bytes
        assert usage.total_bytes <= (room.budget_bytes or 0)
        num_ops = session.counters.num_ops
        gradients(weight, losses)
        assert session.counters.num_ops >= num_ops
        torch.zeros(8).add_(1)
        assert session.counters.num_ops > num_ops


def test_no_fake_gradient_stays_when_a_backward_fails_in_its_middle() -> None:
    """An optimizer that steps inside the backward ends the survey there: leaves have real gradients or none."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.SGD(weights[:1], 0.1)
    weights[0].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with running(base_bytes() + 1300 * 1024):
        z = torch.ones(TOO_MANY_ROWS, WIDTH)
        with pytest.raises(BudgetError):
            train_through(z, weights)
    assert [type(weight.grad) for weight in weights if weight.grad is not None] in ([], [torch.Tensor] * 4)


def train_through(z: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Run a forward and its backward."""
    for weight in weights:
        z = (z @ weight).sin()
    z.sum().backward()
