"""One bench for all tests of a process, and a schedule of its own for each of its plays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.racecheck.paths import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Load the accelerator that computes late."""
    return Bench()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let kernels add in one order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
