"""The class *all* where the space for swapped data is too small, or fails."""

from __future__ import annotations

import contextlib
import errno
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.survey.inventory import NO_SWAP_SPACE
from torchdelta.runtime.tiers.disk import DiskMedium
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 256
PERSISTENT_BYTES = 4 * 8 * (WIDTH + 3) * WIDTH * 4  # parameters, gradients, and two states of Adam
BUDGET_BYTES = 8 << 20


def _train(scope: contextlib.AbstractContextManager[object], num_steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    with scope:
        for _ in range(num_steps):
            model(torch.randn(128, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _refusal(config: Config, budget_bytes: int = BUDGET_BYTES) -> str:
    """Return the text of the error of a budget that is too small, when the budget that it names has trained."""
    text, named_bytes, groups = _failed(config, budget_bytes)
    gc.collect()  # the model in the frames of the error
    assert named_bytes > budget_bytes
    assert sum(groups.values()) == named_bytes
    assert _train(MemoryBudget(named_bytes, config))
    return text


def _failed(config: Config, budget_bytes: int) -> tuple[str, int, dict[str, int]]:
    try:
        _train(MemoryBudget(budget_bytes, config))
    except BudgetError as error:
        return str(error), error.least_budget_bytes, error.groups
    raise AssertionError("it fits")


def _config(tmp_path: Path, **options: Any) -> Config:
    return Config(decision_class="all", planner=None, swap_dir=tmp_path, **options)


def test_the_named_budget_counts_what_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """It was below the budget that was refused."""
    assert "the space for swapped data was full" in _refusal(_config(tmp_path, disk_budget=1 << 16))


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES, 2_600_000], ids=["in the optimizer", "in the forward"])
def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> None:
    """All has to fit then. The disk is off throughout a survey, however long that is."""

    def fail(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskMedium, "write_part", fail)
    text = _refusal(_config(tmp_path), budget_bytes)
    assert "the space for swapped data fails now: the disk tier could not write" in text
    assert "was full" not in text


@pytest.mark.parametrize("disk_budget", [3 << 20, 5 << 20])
@pytest.mark.parametrize("budget_bytes", [2_000_000, 3_000_000, 4_000_000])
def test_a_disk_for_a_part_of_the_tensors(tmp_path: Path, budget_bytes: int, disk_budget: int) -> None:
    """The rest has to fit, optimizer states that are made later included. It is a lower bound."""
    text, named_bytes, groups = _failed(_config(tmp_path, disk_budget=disk_budget), budget_bytes)
    assert f"needs at least {format_bytes(named_bytes, rounds_up=True)}" in text
    assert "the space for swapped data was full" in text
    assert sum(groups.values()) == named_bytes > budget_bytes
    assert groups[NO_SWAP_SPACE] + disk_budget == pytest.approx(PERSISTENT_BYTES, rel=0.01)


@pytest.mark.parametrize("failing", [1, 5, 12, 20])
def test_one_failed_write_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The tier is tried again at once where a step would be refused else."""
    num_writes = 0
    write_part = DiskMedium.write_part

    def write(*arguments: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == failing:
            raise OSError(errno.EIO, "Input/output error")
        write_part(*arguments)

    plain = _train(contextlib.nullcontext())
    monkeypatch.setattr(DiskMedium, "write_part", write)
    seen = _train(MemoryBudget(BUDGET_BYTES, _config(tmp_path)))
    assert num_writes >= failing
    assert all(map(torch.equal, plain, seen))
