"""An arena, where there is a compiler to build it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.native.steps import LEAST_BYTES
from torchdelta.errors import NativeError
from torchdelta.native.arena import new_arena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta.native.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Start an arena on this thread."""
    made = new_arena(least_bytes=LEAST_BYTES, max_plans=4, max_length=1000)
    if isinstance(made, NativeError):
        pytest.skip(f"no arena here: {made}")
    made.start()
    yield made
    made.stop()
