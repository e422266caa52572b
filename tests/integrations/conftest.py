"""What the tests of the integrations share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.collector import give_back, leave_out
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_budget_runs_on() -> Iterator[None]:
    """Free what earlier tests left, and stop a budget that a test left running: neither may spoil the next test.

    The rest is left out of the scans of the next budgets, and of the many collections of trainers.
    """
    leave_out()
    yield
    give_back()
    running = MemoryBudget.current()
    if running is not None:
        running.stop()


@pytest.fixture
def no_budget_is_left(no_budget_runs_on: None) -> Iterator[None]:
    """Check that no budget runs after a test."""
    del no_budget_runs_on
    yield
    assert MemoryBudget.current() is None
