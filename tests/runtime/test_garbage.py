"""Tensors that nobody can reach any more, and what a failed step leaves behind, take no room from a step that fits."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta import BudgetError
from torchdelta.runtime import faults

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_CYCLES = 16
CYCLE_BYTES = 2**16
GARBAGE_BYTES = NUM_CYCLES * CYCLE_BYTES
"""About as much as the step needs."""


class Cycle:
    """Holds a tensor, and itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(CYCLE_BYTES // 4)


def _make_garbage() -> None:
    for _ in range(NUM_CYCLES):
        Cycle()


@pytest.fixture
def _by_hand() -> Iterator[None]:
    """Let nobody but the library collect."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _plain() -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running() as (budget, _):
        observed = train(model, x)
    return observed, budget.summary().peak_bytes


def _fits_beside_garbage(budget_bytes: int, *, before: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    if before:
        _make_garbage()
    with running(budget_bytes) as _:
        if not before:
            _make_garbage()
        return train(model, x)


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_collected_before_a_budget_is_called_impossible(before: bool) -> None:
    """Reference cycles made before the scope or in it: the step runs, with the bits of plain."""
    expected, peak_bytes = _plain()
    assert same_bits(_fits_beside_garbage(peak_bytes + GARBAGE_BYTES // 8, before=before), expected)


@pytest.mark.usefixtures("_by_hand")
def test_without_collecting_garbage_ends_the_step() -> None:
    """The control: with the handling off the same step does not fit."""
    _, peak_bytes = _plain()
    with faults.disabled("garbage"), pytest.raises(BudgetError):
        _fits_beside_garbage(peak_bytes + GARBAGE_BYTES // 8, before=True)


@pytest.mark.usefixtures("_by_hand")
def test_nothing_is_collected_while_the_step_fits() -> None:
    """A collection takes its time, so it comes last."""
    with running(UNLIMITED) as (_, session):
        _make_garbage()
        train(mlp(64, 4), torch.randn(256, 64))
        assert session.ledger.live_bytes >= GARBAGE_BYTES
    gc.collect()


def _least_budget_bytes(budget_bytes: int) -> int:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    exact = pytest.raises(BudgetError, match=r"The least budget for this step is [0-9]")
    with warnings.catch_warnings(action="error"), running(budget_bytes, policy="recompute-only"), exact as kept:
        train(model, x)
    return kept.value.least_budget_bytes


def test_filters_that_raise_do_not_end_a_survey() -> None:
    """Torch warns of what it does itself with fake tensors: an impossible budget has its exact answer all the same.

    What the error's traceback held is garbage by then, and does not count against the next try.
    """
    expected, peak_bytes = _plain()
    least_bytes = _least_budget_bytes(peak_bytes // 5)
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running(least_bytes + 64, policy="recompute-only"):  # and the loss of the first step, which the second meets
        assert same_bits(train(model, x), expected)
