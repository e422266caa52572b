"""One thread, fixed seeds, and nothing left on torch after any test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from torchdelta import _torch
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes says something about the machine only.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Check that no test leaves a session, a dispatch mode, a saved-tensor hook or a patch behind."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine_door = torch.autograd._engine_run_backward
    yield
    torch.set_num_threads(num_threads)
    assert current_session() is None
    assert _torch.num_modes() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.autograd._engine_run_backward is engine_door
