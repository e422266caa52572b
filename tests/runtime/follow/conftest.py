"""What tests of following share."""

from __future__ import annotations

import pytest

from torchdelta.errors import NativeError
from torchdelta.native.counting import new_counter


@pytest.fixture
def needs_counter() -> None:
    """Skip a test where allocations cannot be counted: nothing is followed without that."""
    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip(f"no counting allocator here: {made}")
