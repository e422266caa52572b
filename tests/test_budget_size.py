"""The size of a budget: what is read, what is free, what is refused."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from torchdelta import MemoryBudget
from torchdelta.errors import SizeError
from torchdelta.host import HostMemory
from torchdelta.runtime.device import memory

UNLIMITED = "1TiB"


def step(size: int = 64) -> torch.Tensor:
    """Run one forward and backward whose saved tensors can leave, and return the gradient."""
    x = torch.linspace(-1, 1, size * size).view(size, size).requires_grad_()
    (x * 2).sin().exp().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("written", "size_bytes"), [("8GiB", 8 * 2**30), ("1GB", 10**9), (4096, 4096), ("512MiB", 2**29)]
)
def test_budget_is_read(written: int | str, size_bytes: int) -> None:
    """An int is bytes, text carries its unit."""
    assert MemoryBudget(written).budget_bytes == size_bytes


def test_auto_is_what_is_free_when_it_starts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With the tensors that exist, less a margin; looked up again at every start, and said in one line."""
    monkeypatch.setattr(memory, "session_device", lambda: torch.device("cpu"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    free = [10 * 2**30]
    monkeypatch.setattr(
        memory,
        "read_host_memory",
        lambda: HostMemory(ram_bytes=2**40, available_bytes=free[0], cgroup_limit_bytes=None),
    )
    gc.collect()
    budget = MemoryBudget(" Auto ")
    before_bytes = budget.budget_bytes
    assert before_bytes >= 9 * 2**30
    held = torch.ones(2**20)
    assert MemoryBudget("auto").budget_bytes == before_bytes + 2**22
    for size_bytes in (10 * 2**30, 5 * 2**30):
        free[0] = size_bytes
        with caplog.at_level(logging.INFO, "torchdelta"), budget:
            step()
        summary = budget.summary()
        assert (
            summary.budget_bytes
            == budget.budget_bytes
            == before_bytes + held.nbytes - (10 * 2**30 - size_bytes) * 9 // 10
        )
    said = [one for one in caplog.messages if one.startswith("budget auto: ")]
    assert len(said) == 2
    assert "GiB free on cpu, " in said[0]


def test_share_is_of_the_device() -> None:
    """A percentage is a share of this machine's device memory."""
    whole, half = MemoryBudget("100%").budget_bytes, MemoryBudget("50%").budget_bytes
    assert 2**20 < half < whole
    assert half == pytest.approx(whole / 2, abs=1)


@pytest.mark.parametrize("written", [0.8, 8e9, True, 0, -1, "8 potatoes", "80", "8G", "", None])
def test_what_is_no_size_is_refused(written: Any) -> None:
    """A bare float is ambiguous; other sizes are not."""
    with pytest.raises(SizeError):
        MemoryBudget(written)


def test_bare_float_names_both_readings() -> None:
    """The message shows what to write instead."""
    with pytest.raises(SizeError, match=r"'80%'.*'0\.8GiB'"):
        MemoryBudget(0.8)  # pyright: ignore[reportArgumentType]
