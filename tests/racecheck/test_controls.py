"""The checker finds what others have shipped, and finds nothing where it was mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.racecheck.controls import CONTROLS, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.racecheck.paths import Bench

pytestmark = pytest.mark.racecheck


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_a_known_race_is_found(bench: Bench, control: Callable[..., None]) -> None:
    """Each faulty offloader is found in each schedule, and its mended form is clean in each."""
    for seed in range(5):
        verdict = judge(bench, control, seed)
        assert verdict.found
        assert verdict.found_mended == []
