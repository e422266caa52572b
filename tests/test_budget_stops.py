"""A budget that is stopped where it runs: inside the scope, in an op, in a backward."""

from __future__ import annotations

import os
import signal
from typing import Literal

import pytest
import torch

from tests.runtime.parts import num_saved_hooks
from tests.test_budget import UNLIMITED, step
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import mode_stack


def test_an_error_after_a_stop_inside_the_scope_passes() -> None:
    """That the budget was stopped already must not hide it."""

    def stop_and_fail(budget: MemoryBudget) -> None:
        budget.stop()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), MemoryBudget(UNLIMITED) as budget:
        stop_and_fail(budget)


@torch.library.custom_op("torchdelta_tests::sends_signal", mutates_args=())
def sends_signal(x: torch.Tensor) -> torch.Tensor:
    """Return a copy, and send a signal to this process meanwhile."""
    os.kill(os.getpid(), signal.SIGUSR1)
    return x.clone()


@pytest.mark.parametrize("decision_class", ["saved", "all"])
def test_a_signal_handler_stops_the_budget_inside_an_op(decision_class: Literal["saved", "all"]) -> None:
    """Torch puts the mode that handles the op back onto its stack; nothing acts any more."""
    budget = MemoryBudget("1MiB", Config(decision_class=decision_class, planner=None))
    earlier = signal.signal(signal.SIGUSR1, lambda *_: budget.stop())
    try:
        budget.start()
        copy = sends_signal(torch.ones(4))
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert MemoryBudget.current() is None
    assert torch.zeros(4 << 20).numel() == 4 << 20  # more than the budget
    with MemoryBudget(UNLIMITED):
        assert copy.sum() == 4
        assert torch.equal(step(), step())
    assert not mode_stack()


@pytest.mark.parametrize("decision_class", ["saved", "all"])
@pytest.mark.parametrize("size", ["100KiB", UNLIMITED], ids=["tight", "paused"])
def test_a_hook_in_a_backward_stops_the_budget(decision_class: Literal["saved", "all"], size: str) -> None:
    """The backward goes on without it, with what has left, in steps that are recorded and in others."""
    plain = step()
    budget = MemoryBudget(size, Config(decision_class=decision_class, planner=None, tier="memory"))
    budget.start()
    for _ in range(6 if size == UNLIMITED else 0):  # then recording pauses
        step()
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
    middle = (x * 2).sin()
    total = middle.exp().sum()
    middle.register_hook(lambda _gradient: budget.stop())
    total.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
    assert MemoryBudget.current() is None
    assert not mode_stack()
    assert num_saved_hooks() == 0
    assert torch.zeros(1 << 20).numel() == 1 << 20
