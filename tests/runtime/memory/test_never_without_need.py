"""Nothing moves and nothing is copied where everything fits; where it does not, writes in between cost no bit."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, mlp, running, same_bits
from tests.sampling import sample
from torchdelta import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 64
POLICIES = ["torchdelta", "swap-only", "recompute-only"]


def data_of(model: nn.Module) -> list[torch.Tensor]:
    """Return every parameter and buffer."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def optimizer_in_backward(model: nn.Module) -> list[torch.Tensor]:
    """Step each parameter as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(torch.randn(32, WIDTH)).square().mean().backward()
    return data_of(model)


def retained_graph(model: nn.Module) -> list[torch.Tensor]:
    """Keep the graph through the optimizer's step, and run a second forward while it lives."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for _ in range(3):
        loss = model(torch.randn(32, WIDTH)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        other = model(torch.randn(32, WIDTH)).abs().mean()
        losses += [loss.detach(), other.detach()]
        optimizer.zero_grad()
        other.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *data_of(model)]


def two_losses(model: nn.Module) -> list[torch.Tensor]:
    """Two losses of one forward, and a graph that is only logged."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        out = model(torch.randn(32, WIDTH))
        logged = model(torch.randn(32, WIDTH)).mean()
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del logged
    return data_of(model)


def written_inputs(model: nn.Module) -> list[torch.Tensor]:
    """Write inputs between forward and backward: through `.data`, and by `copy_` where autograd does not need them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    batch, scale = torch.randn(32, WIDTH), torch.full((32, WIDTH), 0.5)
    for step in range(3):
        hidden = (batch + scale).sin()  # a replay reads both, autograd saves their sum alone
        loss = model(hidden).square().mean()
        with torch.no_grad():
            batch.copy_(torch.randn(32, WIDTH))
            scale.mul_(1.5 + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [batch, scale, *data_of(model)]


def written_data(model: nn.Module) -> list[torch.Tensor]:
    """Write weights and inputs through `.data` while another loss is alive."""
    batch, losses = torch.randn(32, WIDTH), []
    for _ in range(3):
        loss = model((batch * 2).cos()).square().mean()
        batch.data.copy_(torch.randn(32, WIDTH))
        losses.append(loss.detach())
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.05)
                parameter.grad = None
    return [batch, *losses, *data_of(model)]


LOOPS = [optimizer_in_backward, retained_graph, two_losses, written_inputs, written_data]


def run(loop: Callable[[nn.Module], list[torch.Tensor]], seed: int) -> list[torch.Tensor]:
    """Build a model from a seed and train it."""
    torch.manual_seed(seed)
    return loop(mlp(WIDTH, depth=3))


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_moves_in_a_huge_budget(loop: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    """With room for everything nothing is swapped, recomputed or copied before a write, and bits are the plain ones."""
    plain = run(loop, 0)
    with running(UNLIMITED) as (budget, session):
        ours = run(loop, 0)
        assert session.counters.num_copies_before_write == 0
    summary = budget.summary()
    assert summary.swapped_out_bytes == 0
    assert summary.recomputed_bytes == 0
    assert same_bits(plain, ours)


@pytest.mark.parametrize(("loop", "policy"), sample(itertools.product(LOOPS, POLICIES), 4))
def test_writes_in_between_cost_no_bit_in_a_tight_budget(
    loop: Callable[[nn.Module], list[torch.Tensor]], policy: str
) -> None:
    """A dozen seeds with whatever leaves in a tight budget: every parameter, input and loss is the plain one.

    Each seed begins just below what its run needs, and takes less until something leaves or the policy needs more.
    """
    gc.collect()  # what earlier tests left would be room once it is collected
    with running() as (budget, session):
        base_bytes = session.ledger.usage.total_bytes
        run(loop, 0)
        needed_bytes = (budget.summary().peak_bytes or 0) - base_bytes
    del session
    num_trained = evicted_bytes = 0
    for seed in range(12):
        plain = run(loop, seed)
        for percent in range(99 - seed % 6, 0, -6):
            gc.collect()
            with running() as (_, session):
                base_bytes = session.ledger.usage.total_bytes
            del session
            try:
                with running(base_bytes + needed_bytes * percent // 100, policy=policy) as (budget, _):
                    ours = run(loop, seed)
            except BudgetError:  # this policy needs more
                break
            assert same_bits(plain, ours), (seed, percent)
            del ours
            num_trained += 1
            run_evicted_bytes = budget.summary().swapped_out_bytes + budget.summary().recomputed_bytes
            evicted_bytes += run_evicted_bytes
            if run_evicted_bytes:
                break
        del plain
    assert num_trained >= 3
    assert evicted_bytes > 0


@pytest.mark.parametrize("loop", sample(LOOPS, 1))
def test_writes_in_between_cost_no_bit_when_everything_is_recomputed(
    loop: Callable[[nn.Module], list[torch.Tensor]],
) -> None:
    """The same where every saved tensor is dropped and replayed."""
    for seed in range(12):
        plain = run(loop, seed)
        with running(UNLIMITED, decisions="recompute") as (budget, _):
            ours = run(loop, seed)
        assert same_bits(plain, ours), seed
        assert budget.summary().recomputed_bytes > 0
