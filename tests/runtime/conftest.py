"""One thread, fixed seeds, and nothing left on torch after any test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.collector import give_back, leave_out
from tests.runtime.parts import engine_door, num_saved_hooks
from torchdelta._torch.modes import num_modes
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _quick_collector() -> Iterator[None]:
    """Leave what is there before a file's tests (imports, mostly) out of the collections and scans in them."""
    leave_out()
    yield
    give_back()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread in a file's tests, and in what its fixtures train: with others, sums have other bits."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Check that no test leaves a session, a dispatch mode, a saved-tensor hook or a patch behind."""
    torch.manual_seed(0)
    door = engine_door()
    yield
    torch.set_num_threads(1)
    assert current_session() is None
    assert num_modes() == 0
    assert num_saved_hooks() == 0
    assert engine_door() is door
