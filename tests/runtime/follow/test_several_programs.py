"""Loops whose steps differ have one program for each kind of step; other steps borrow a program or run reactively."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, running
from torchdelta.runtime.follow.wanted import MOST_FRUITLESS_TRACES

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, DEPTH = 64, 8
WAIT_S = 240.0

Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class _Network(nn.Module):
    """Residual blocks, each of which may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, skipped: int = -1, depth: int = DEPTH) -> torch.Tensor:
        for index, block in enumerate(self.blocks[:depth]):
            if index != skipped:
                x = x + self.dropout(block(x))
        return x


def _train(budget: int, step: Step, num_steps: int, planner: str | None = None) -> tuple[list, list[int], Session]:
    """Return the parameters, the peaks by step, and the session. Plans are waited for after each step."""
    model = _Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    with running(budget, planner=planner, tier="memory") as (memory_budget, session):
        for index in range(num_steps):
            step(model, optimizer, index)
            session.programs.wait(WAIT_S)
    peaks = [one.peak_bytes for one in memory_budget.summary().steps]
    return [parameter.detach().clone() for parameter in model.parameters()], peaks, session


def _compare(step: Step, num_steps: int, share: float) -> tuple[list[int], int, Session]:
    """Train plain and followed. Assert equal bits. Return the peaks, the budget and the session."""
    expected, plain_peaks, _ = _train(UNLIMITED, step, num_steps)
    budget = int(share * max(plain_peaks[1:]))
    found, peaks, session = _train(budget, step, num_steps, "torchdelta")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return peaks, budget, session


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_each_length_has_a_program_of_its_own():
    """Four lengths in random order: all are followed exactly once each was traced, at once with a borrowed program."""
    lengths = [384, 512, 640, 768]
    order = [*random.Random(0).choices(lengths, k=6), *lengths, *lengths, *random.Random(1).choices(lengths, k=8)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        _update(optimizer, model(torch.randn(order[index], WIDTH)).square().mean())

    peaks, budget, session = _compare(step, len(order), 0.6)
    assert max(peaks) <= budget
    assert len(session.programs.cache) == len(lengths)
    assert session.follower.num_followed_steps == len(order) - 2  # all from the first program on
    assert session.follower.num_diverged_steps == 0
    summary = session.summary()
    by_plan = collections.Counter(step.plan for step in summary.steps if step.plan)
    assert summary.follow is not None
    assert summary.follow.num_steps_by_plan == by_plan
    assert sorted(by_plan) == list(range(1, len(lengths) + 1))
    assert by_plan.total() == session.follower.num_followed_steps


def test_micro_batches_of_an_accumulation_are_followed():
    """The first micro-batch begins without gradients, the others with them: the program for the larger start serves."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index % 3 == 0:
            optimizer.zero_grad()
        model(torch.randn(512, WIDTH)).square().mean().backward()
        if index % 3 == 2:
            optimizer.step()

    peaks, budget, session = _compare(step, 15, 0.6)
    assert max(peaks[3:]) <= budget
    assert session.follower.num_followed_steps >= 9


@pytest.mark.rest
def test_a_layer_dropped_at_random_changes_the_program():
    """Steps begin alike and part where a block is skipped: the program of that sequence takes over from there on."""
    skipped = [random.Random(3).choice([-1, 2, 5]) for _ in range(24)]
    skipped = [-1, -1, 2, 2, 5, 5, 5, *skipped]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        x = torch.randn(512, WIDTH)
        _update(optimizer, model(x, skipped=skipped[index]).square().mean())

    peaks, budget, session = _compare(step, len(skipped), 0.65)
    assert max(peaks) <= budget
    assert len(session.programs.cache) >= 2
    assert session.follower.num_followed_steps >= len(skipped) - 12


def _num_traces_later(session: Session, step: Callable[[], object], num_steps: int) -> int:
    """Return how many of the next steps are traced to their end."""
    num_traced = 0
    for _ in range(num_steps):
        step()
        num_traced += session.ledger.observing.observer.wants_every_op
    return num_traced


@pytest.mark.rest
def test_the_first_step_of_a_network_with_batch_norm_is_the_same_step_as_the_others():
    """Running statistics come from outside in the first step, from the step before in the others. All have one plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1024, 1024)

    def step() -> None:
        _update(optimizer, model(x).square().mean())

    step()
    with running(UNLIMITED) as (budget, _):
        step()
        step()
    with running(int(0.8 * budget.summary().peak_bytes), planner="torchdelta", tier="memory") as (_, session):
        step()
        step()
        assert session.programs.wait(WAIT_S)
        assert _num_traces_later(session, step, 4) == 0
        assert session.follower.num_followed_steps == 4


@pytest.mark.rest
def test_a_step_that_does_not_come_again_is_not_waited_for_long():
    """Steps that begin like one that was seen once are traced a few times, not for ever."""
    order = [-1, *[2] * 16]
    calls = iter([-1, -1, *order])
    model = _Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        _update(optimizer, model(torch.randn(512, WIDTH), skipped=next(calls)).square().mean())

    with running(UNLIMITED) as (budget, _):
        step()
        step()
    with running(int(0.65 * budget.summary().peak_bytes), planner="torchdelta", tier="memory") as (_, session):
        for _ in range(3):
            step()
            session.programs.wait(WAIT_S)
        assert _num_traces_later(session, step, len(order) - 3) <= MOST_FRUITLESS_TRACES
        assert session.follower.num_followed_steps >= len(order) - 3


@pytest.mark.rest
def test_a_forward_that_is_only_evaluated_is_no_step():
    """A pass with gradients enabled and no backward begins a program, and the training step after it begins anew."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index % 2:
            model(torch.randn(256, WIDTH)).square().mean().item()
        _update(optimizer, model(torch.randn(512, WIDTH)).square().mean())

    peaks, budget, session = _compare(step, 10, 0.6)
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps >= 7
    assert session.follower.num_diverged_steps == 0


def test_a_step_that_evaluates_before_its_forward_is_followed():
    """What was saved for a value alone is not among the saves of the step, in its trace as in the steps that follow."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _index: int) -> None:
        x = torch.randn(512, WIDTH)
        model(x, depth=2).sum().item()
        _update(optimizer, model(x).square().mean())

    peaks, budget, session = _compare(step, 8, 0.6)
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 6


def _fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError("in backward")


@pytest.mark.rest
def test_a_backward_that_raises_is_not_planned():
    """Its trace ends in the middle, though all its saves are those of a whole step: the next one is traced."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        y = model(torch.randn(512, WIDTH), depth=4)
        if index in (1, 5):
            y.register_hook(_fail)
        loss = model(y, depth=DEPTH).square().mean()
        if index in (1, 5):
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            optimizer.zero_grad()
        else:
            _update(optimizer, loss)

    peaks, budget, session = _compare(step, 10, 0.6)
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps >= 5
    assert session.follower.reasons == {"its backward raised ZeroDivisionError": 1}


@pytest.mark.rest
def test_gradients_that_are_kept_or_freed_are_two_kinds_of_backward():
    """A backward that was proven with gradients in place is watched where it makes them."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.zero_grad(set_to_none=index >= 6)
        model(torch.randn(512, WIDTH)).square().mean().backward()
        optimizer.step()

    peaks, budget, session = _compare(step, 12, 0.75)
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps >= 9


@pytest.mark.rest
def test_two_losses_of_one_graph_run_reactively():
    """No plan of the class saved fits, since what the first backward brings back stays for the second."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _index: int) -> None:
        y = model(torch.randn(512, WIDTH))
        optimizer.zero_grad()
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        optimizer.step()

    peaks, budget, session = _compare(step, 8, 0.7)
    assert max(peaks[1:]) <= budget
    assert session.follower.num_followed_steps == 0


@pytest.mark.rest
def test_a_model_that_grows_and_an_early_exit_fall_back():
    """Fewer blocks leave the program early, more blocks go beyond it: the same bits within the budget."""
    depths = [5, 5, 5, 5, DEPTH, DEPTH, DEPTH, 3, DEPTH, 5, 3]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        _update(optimizer, model(torch.randn(512, WIDTH), depth=depths[index]).square().mean())

    peaks, budget, session = _compare(step, len(depths), 0.65)
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps >= 3


@pytest.mark.rest
def test_five_hundred_steps_of_twenty_lengths():
    """No wrong bit, no step above the budget, nothing grows, and nearly all steps are followed after the first 60."""
    lengths = [256 + 24 * index for index in range(20)]
    order = random.Random(7).choices(lengths, k=500)
    followed: list[int] = []
    alive: list[int] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        _update(optimizer, model(torch.randn(order[index], WIDTH), depth=4).square().mean())

    expected, plain_peaks, _ = _train(UNLIMITED, step, len(order))
    budget = int(0.6 * max(plain_peaks[1:]))
    model = _Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    with running(budget, planner="torchdelta", tier="memory") as (memory_budget, session):
        for index in range(len(order)):
            step(model, optimizer, index)
            followed.append(session.follower.num_followed_steps)
            alive.append(len(session.ledger.records) + len(session.ledger.held))
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))
    assert max(one.peak_bytes for one in memory_budget.summary().steps) <= budget
    assert followed[-1] - followed[60] >= 0.9 * (len(order) - 61)
    assert max(alive[250:]) <= max(alive[:250])
    assert len(session.programs.cache) <= len(lengths)
