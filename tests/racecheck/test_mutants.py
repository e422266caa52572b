"""Each wait of the tiers is removed once, and the checker finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.racecheck.hunts import KNOWN, hunt
from tests.racecheck.mutants import Mutant, find_mutants

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench

pytestmark = pytest.mark.racecheck
MUTANTS = find_mutants()
MOST_SEEDS = 60


def rest_unless_pinned(mutant: Mutant) -> object:
    """Leave the slower hunts to `make test-rest`."""
    is_quick = mutant.module.endswith(("tiers.accelerator", "tiers.pinned"))
    return pytest.param(mutant, id=mutant.name, marks=() if is_quick else pytest.mark.rest)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a mutant may break a thread
@pytest.mark.parametrize("mutant", [rest_unless_pinned(each) for each in MUTANTS if each.name not in KNOWN])
def test_a_removed_wait_is_found(bench: Bench, mutant: Mutant) -> None:
    """Some schedule of some path shows it."""
    assert hunt(bench, mutant, most_seeds=MOST_SEEDS) is not None


def test_every_exception_is_a_mutant() -> None:
    """No reason is kept for a wait that is not there any more."""
    assert set(KNOWN) <= {mutant.name for mutant in MUTANTS}
