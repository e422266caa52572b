"""Training goes on when the disk does not: with the same bits, or with one clear error where bits are lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.faults.programs import (
    Fault,
    Loop,
    Report,
    Scope,
    complaints,
    forced,
    no_fault,
    pressed,
    run,
)
from tests.faults.switches import disabled
from tests.following import following_drawn
from tests.sampling import sample
from torchdelta.errors import TierIOError
from torchdelta.runtime.tiers.copier import CopyTransfer
from torchdelta.runtime.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Whatever is saved is swapped, or what a budget presses out is.
CONDITIONS: dict[str, Callable[..., Scope]] = {
    "swap": lambda directory, **options: forced("swap", directory, **options),
    "pressed": lambda directory, **options: pressed(directory, policy="swap-only", **options),
    "followed": lambda directory, **options: (
        lambda: following_drawn(**{"swap_dir": directory, "tier": "disk", "policy": "swap-only"} | options)
    ),
}


@pytest.fixture(scope="module")
def plain() -> Report:
    """Train without a budget and without a fault: no fault of the disk's is seen by a plain run."""
    return run(no_fault)


def replacing(name: str, stand_in: Any) -> Fault:
    """Return a fault that replaces a function of `os` for as long as it lasts."""

    @contextlib.contextmanager
    def fault(_loop: Loop) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, stand_in)
            yield

    return fault


def refuse(number: int) -> Callable[..., int]:
    """Return a function of `os` that fails with this error number."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


FAILURES: dict[str, Fault] = {
    "full": replacing("pwrite", refuse(errno.ENOSPC)),
    "over-quota": replacing("pwrite", refuse(errno.EDQUOT)),
    "unwritable": replacing("pwrite", refuse(errno.EIO)),
    "unreadable": replacing("preadv", refuse(errno.EIO)),
    "short-write": replacing("pwrite", lambda *_: 0),
    "short-read": replacing("preadv", lambda *_: 0),
    "cannot-grow": replacing("posix_fallocate", refuse(errno.ENOSPC)),
}


@pytest.mark.parametrize(("name", "condition"), sample(itertools.product(FAILURES, CONDITIONS), 8))
def test_training_outlives_a_disk_that_fails(name: str, condition: str, plain: Report, tmp_path: Path) -> None:
    """What fails in one step stays, or is recomputed; nothing is raised, and later steps swap again."""
    ours = run(FAILURES[name], CONDITIONS[condition](tmp_path))
    assert complaints(plain, ours) == []
    assert ours.budget is not None
    assert ours.budget.summary().steps[-1].swapped_out_bytes > 0 or condition == "pressed"


@pytest.mark.parametrize("name", ["full", "unreadable", "short-write", "short-read"])
def test_control_without_the_handling_a_failing_disk_is_fatal(name: str, plain: Report, tmp_path: Path) -> None:
    """The negative control: the step ends in the tier's error."""
    with disabled("tier-failure"):
        try:
            ours = run(FAILURES[name], forced("swap", tmp_path))
        except TierIOError:
            return  # a second copy was still under way when the step ended, and the next op met its error
    assert ours.raised == [TierIOError]
    assert complaints(plain, ours) != []


def test_swapping_is_taken_up_again(plain: Report, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bad step says so once and costs little: the steps after it swap as much as those before."""
    with caplog.at_level(logging.INFO, logger="torchdelta"):
        ours = run(FAILURES["full"], forced("swap", tmp_path), num_steps=8)
    assert ours.budget is not None
    swapped = [step.swapped_out_bytes for step in ours.budget.summary().steps]
    assert swapped[-1] == swapped[0] > 0
    told = [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert len(told) == 1
    assert "works again" in caplog.text
    del plain


def test_control_without_retries_swapping_stays_off(tmp_path: Path) -> None:
    """The negative control: one failure switches swapping off for good."""
    with disabled("tier-retry"):
        ours = run(FAILURES["full"], forced("swap", tmp_path), num_steps=8)
    assert ours.budget is not None
    assert ours.budget.summary().steps[-1].swapped_out_bytes == 0


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_slow_disk_only_takes_time(condition: str, plain: Report, tmp_path: Path) -> None:
    """Copies that take far longer than the compute beside them: the budget holds, the bits are the same."""
    assert complaints(plain, run(SLOW, CONDITIONS[condition](tmp_path))) == []


@contextlib.contextmanager
def SLOW(_loop: Loop) -> Iterator[None]:  # noqa: N802 - one of the faults
    """Every call takes milliseconds."""
    real_write, real_read = os.pwrite, os.preadv

    def slow_write(*arguments: Any) -> int:
        time.sleep(0.004)
        return real_write(*arguments)

    def slow_read(*arguments: Any) -> int:
        time.sleep(0.004)
        return real_read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", slow_write)
        patch.setattr(os, "preadv", slow_read)
        yield


def test_control_without_waiting_a_slow_disk_changes_bits(
    plain: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: who does not wait for a read computes with what was there before it."""
    monkeypatch.setattr(CopyTransfer, "wait", lambda _self: 0.0)
    assert complaints(plain, run(SLOW, forced("swap", tmp_path))) != []


# -- directories


def unusable(path: Path) -> Path:
    """A directory in which nobody can make a file, root included."""
    del path
    return Path("/proc")


def removed(path: Path) -> Path:
    """A directory that goes before anything was swapped."""
    (path / "swap").mkdir()
    return path / "swap"


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("make", [unusable, removed])
def test_without_its_directory_training_goes_on(
    make: Callable[[Path], Path],
    condition: str,
    plain: Report,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file cannot be made: one warning names the directory and the remedy, and what was to be swapped is not."""
    directory = make(tmp_path)
    scope = CONDITIONS[condition](directory)

    @contextlib.contextmanager
    def without_directory() -> Iterator[Any]:
        with scope() as budget:
            if make is removed:
                directory.rmdir()
            yield budget

    ours = run(no_fault, without_directory)
    assert complaints(plain, ours) == []
    assert ours.budget is not None
    assert ours.budget.summary().swapped_out_bytes == 0
    assert ours.budget.summary().num_recomputed_ops > 0 or condition == "followed"  # without a tier nothing is planned
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in told if str(directory) in line and "swap_dir" in line]) == 1


def test_control_without_the_handling_a_missing_directory_is_fatal(tmp_path: Path) -> None:
    """The negative control: the first swap ends the step."""
    with disabled("tier-failure"):
        ours = run(no_fault, forced("swap", unusable(tmp_path)))
    assert ours.raised


def test_a_directory_removed_while_running_changes_nothing(plain: Report, tmp_path: Path) -> None:
    """The file needs no name: it lives on."""
    directory = removed(tmp_path)

    @contextlib.contextmanager
    def remove(_loop: Loop) -> Iterator[None]:
        directory.rmdir()
        yield

    ours = run(remove, forced("swap", directory))
    assert not directory.exists()
    assert complaints(plain, ours) == []
    assert ours.budget is not None
    assert ours.budget.summary().steps[-1].swapped_out_bytes > 0


# -- bytes that change on the disk


@contextlib.contextmanager
def FLIPPED(_loop: Loop) -> Iterator[None]:  # noqa: N802 - one of the faults
    """One bit of everything that is written changes on its way."""
    real_write = os.pwrite

    def flip(descriptor: int, view: memoryview, offset: int) -> int:
        damaged = np.frombuffer(view, np.uint8).copy()
        damaged[len(damaged) // 3] ^= 16
        aligned = torch.empty(len(damaged) + 4096, dtype=torch.uint8).numpy()
        start = -aligned.ctypes.data % 4096
        aligned[start : start + len(damaged)] = damaged
        return real_write(descriptor, memoryview(aligned)[start : start + len(damaged)], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", flip)
        yield


@pytest.mark.parametrize("condition", CONDITIONS)
def test_flipped_bytes_are_recomputed(condition: str, plain: Report, tmp_path: Path) -> None:
    """With checksums on, what came back other than it went is made again by its op."""
    ours = run(FLIPPED, CONDITIONS[condition](tmp_path, checksum=True))
    assert complaints(plain, ours) == []


def test_control_without_checksums_flipped_bytes_are_wrong_gradients(plain: Report, tmp_path: Path) -> None:
    """The negative control, and the reason for the option."""
    ours = run(FLIPPED, forced("swap", tmp_path, checksum=False))
    assert ours.raised == []
    assert complaints(plain, ours) != []


def test_flipped_bytes_that_nothing_can_make_again_are_an_error(tmp_path: Path) -> None:
    """A batch from outside is lost: the error names it, and the next step is right."""
    weight = torch.ones(64, 64, requires_grad=True)
    batches = [torch.full((64, 64), 2.0) for _ in range(2)]
    with forced("swap", tmp_path, checksum=True)():
        with FLIPPED(None):  # type: ignore[arg-type]
            loss = (batches.pop() * weight).sum()
            with pytest.raises(TierIOError, match=r"saved tensor of 16384 bytes cannot be brought back: .*checksum"):
                loss.backward()
        del loss
        assert weight.grad is None
        for _ in range(40):  # until the disk is tried again
            torch.zeros(1).add(1)
        (batches.pop() * weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((64, 64), 2.0))


# -- disk_budget


@pytest.mark.parametrize("disk_budget", [4096, 50_000, 100_000])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_what_the_disk_budget_does_not_hold_goes_another_way(
    condition: str, disk_budget: int, plain: Report, tmp_path: Path
) -> None:
    """It is recomputed or kept; the file never takes more than it may."""
    ours = run(no_fault, CONDITIONS[condition](tmp_path, disk_budget=disk_budget))
    assert complaints(plain, ours) == []
    assert ours.tier is not None
    assert ours.tier.peak_used_bytes <= disk_budget
    assert ours.budget is not None
    assert ours.budget.summary().num_recomputed_ops > 0


def test_control_without_the_disk_budget_more_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the tier itself is told of no budget."""
    real_init = DiskTier.__init__

    def unlimited(self: DiskTier, **options: Any) -> None:
        real_init(self, **{**options, "capacity_bytes": None})

    monkeypatch.setattr(DiskTier, "__init__", unlimited)
    ours = run(no_fault, forced("swap", tmp_path, disk_budget=50_000))
    assert ours.tier is not None
    assert ours.tier.peak_used_bytes > 50_000
