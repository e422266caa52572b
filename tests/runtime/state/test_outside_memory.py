"""Memory that code outside of torch has allocated is known by the function that frees it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchdelta.native.weak_storage import weak_storage_type
from torchdelta.runtime.state import outside_memory
from torchdelta.runtime.state.outside_memory import is_outside_storage


def test_the_storage_that_is_asked_lives_until_it_is_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weak reference is made from an address: that of a storage that has died crashes the process."""
    asked: list[Any] = []
    address_of = outside_memory.address_of

    def noted(storage: torch.UntypedStorage) -> int:
        asked.append(weakref.ref(storage))
        return address_of(storage)

    def weak_storage(_address: int) -> Any:
        assert asked[-1]() is not None
        return SimpleNamespace(deleter=lambda: 7)

    monkeypatch.setattr(outside_memory, "address_of", noted)
    monkeypatch.setattr(outside_memory, "weak_storage_type", lambda: weak_storage)
    assert is_outside_storage(torch.from_numpy(np.ones(4)).untyped_storage())
    assert len(asked) == 2


@pytest.mark.skipif(weak_storage_type() is None, reason="needs the native module")
def test_numpys_memory_is_outside_and_torchs_is_not() -> None:
    """By the function that frees it."""
    assert is_outside_storage(torch.from_numpy(np.ones(4)).untyped_storage())
    assert not is_outside_storage(torch.ones(4).untyped_storage())
