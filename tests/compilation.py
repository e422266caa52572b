"""Forgets compiled code around a test. Import the fixture where functions are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Compilation warns about itself and about what it imports.
QUIET = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code, so that no test runs what another one compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
