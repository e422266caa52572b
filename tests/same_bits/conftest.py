"""Conditions under which bits can be compared, and the collector kept quick."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.collector import give_back
from tests.same_bits.judge import comparable_conditions, on_device

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _thaw() -> Iterator[None]:
    """Give back to the collector, at the end of a file, what its tests left out."""
    yield
    give_back()


@pytest.fixture(autouse=True)
def _comparable() -> Iterator[None]:
    """Give every test of this folder the same conditions."""
    with comparable_conditions(), on_device():
        yield
