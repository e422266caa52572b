"""The patches go on together, and come off together."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.runtime.programs import UNLIMITED
from torchdelta import MemoryBudget
from torchdelta.runtime import patches


def test_a_patch_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope does not open, torch is as it was, handlers too, and the next scope has all patches."""
    engine, handler = torch.autograd.graph._engine_run_backward, signal.getsignal(signal.SIGINT)

    def fail(_make: object) -> None:
        raise RuntimeError("no such thing in this torch")

    with monkeypatch.context() as patched:
        patched.setattr(patches, "patch_compiled_call", fail)
        with pytest.raises(RuntimeError, match="no such thing"):
            MemoryBudget(UNLIMITED).start()
    assert torch.autograd.graph._engine_run_backward is engine
    assert signal.getsignal(signal.SIGINT) is handler
    with MemoryBudget(UNLIMITED):
        assert len(patches._undo) == 4
        assert torch.autograd.graph._engine_run_backward is not engine
    assert torch.autograd.graph._engine_run_backward is engine
