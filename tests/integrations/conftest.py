"""What the tests of the integrations share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_budget_runs_on() -> Iterator[None]:
    """Free what earlier tests left, and stop a budget that a test left running: neither may spoil the next test."""
    gc.unfreeze()  # what died in circles after it was left out of collections
    gc.collect()
    yield
    running = MemoryBudget.current()
    if running is not None:
        running.stop()


@pytest.fixture
def no_budget_is_left(no_budget_runs_on: None) -> Iterator[None]:
    """Check that no budget runs after a test."""
    del no_budget_runs_on
    yield
    assert MemoryBudget.current() is None
