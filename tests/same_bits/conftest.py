"""Conditions under which bits can be compared, and the collector kept quick."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _thaw() -> Iterator[None]:
    """Give back to the collector, at the end of a file, what its tests left out."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _comparable() -> Iterator[None]:
    """Run on one thread, and leave the objects of earlier imports out of this test's many collections.

    `transformers` and the op database are about a million objects; the judge collects after each of its runs.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    torch.set_num_threads(num_threads)
