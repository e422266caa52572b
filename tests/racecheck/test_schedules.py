"""The paths of the library under random schedules; `python -m tests.racecheck schedules` plays ten thousand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.racecheck.paths import BUDGETS, MODELS
from tests.racecheck.schedules import ALL_PATHS, play

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench
    from tests.racecheck.schedules import Path

pytestmark = pytest.mark.racecheck
NUM_SAMPLED = 4
NUM_MORE = 8


def assert_clean(bench: Bench, path: Path, seeds: range) -> None:
    """Play schedules of a path; none of its kernels may run at its launch for want of a meta kernel."""
    before = bench.extension.counts()["num_at_launch"]
    for seed in seeds:
        shown = play(bench, path, seed)
        assert shown.found == (), f"seed {seed}"
    after = bench.extension.counts()
    assert after["num_at_launch"] == before, after["names_at_launch"]


@pytest.mark.parametrize("path", ALL_PATHS, ids="/".join)
def test_our_paths_are_clean(bench: Bench, path: Path) -> None:
    """The plain run's bits, no race and no use after free, in whatever order the device works."""
    assert_clean(bench, path, range(NUM_SAMPLED))


@pytest.mark.rest
@pytest.mark.parametrize("path", ALL_PATHS, ids="/".join)
def test_our_paths_are_clean_in_more_schedules(bench: Bench, path: Path) -> None:
    """The same for more orders."""
    assert_clean(bench, path, range(NUM_SAMPLED, NUM_SAMPLED + NUM_MORE))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget", [name for name, kind in BUDGETS.items() if kind.is_limited])
def test_limits_make_something_leave(bench: Bench, model: str, budget: str) -> None:
    """A limit in which nothing had to leave, or in which no step fits, would check nothing."""
    shown = bench.play(model, budget, 0)
    assert shown.has_fitted
    assert shown.left_bytes > 0


def test_kernels_are_late(bench: Bench) -> None:
    """Kernels and copies are queued, and freed memory is handed on: the check checks."""
    before = bench.extension.counts()
    for budget in ("swap", "recompute", "followed"):
        assert bench.play("residual", budget, 1).found == ()
    after = bench.extension.counts()
    assert after["num_reused"] > before["num_reused"] + 100
    assert after["num_kernels"] > before["num_kernels"] + 300
