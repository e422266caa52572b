"""The patches go on together, and come off together."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.runtime.parts import engine_door
from tests.runtime.programs import UNLIMITED
from torchdelta import MemoryBudget
from torchdelta.runtime import patches


def test_a_patch_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope does not open, torch is as it was, handlers too, and the next scope has all patches."""
    door, handler = engine_door(), signal.getsignal(signal.SIGINT)

    def fail(_make: object) -> None:
        raise RuntimeError("no such thing in this torch")

    with monkeypatch.context() as patched:
        patched.setattr(patches, "patch_compiled_call", fail)
        with pytest.raises(RuntimeError, match="no such thing"):
            MemoryBudget(UNLIMITED).start()
    assert engine_door() is door
    assert signal.getsignal(signal.SIGINT) is handler
    guard = torch.autograd.graph.disable_saved_tensors_hooks
    with MemoryBudget(UNLIMITED):
        assert engine_door() is not door
        assert torch.autograd.graph.disable_saved_tensors_hooks is not guard
    assert engine_door() is door
