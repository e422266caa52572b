"""The collector is kept quick: tracing a model makes many objects, and `transformers` has made a million before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.collector import give_back, leave_out

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _quick_collector() -> Iterator[None]:
    """Leave what is there before a test out of the collections in it."""
    leave_out()
    yield
    give_back()
