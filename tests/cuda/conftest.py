"""Every test of this folder needs a CUDA device, and conditions under which bits can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.collector import give_back
from tests.same_bits.judge import comparable_conditions, on_device

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    """Make tensors on the device, with fixed algorithms."""
    with comparable_conditions(), on_device():
        yield
    give_back()
