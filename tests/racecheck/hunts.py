"""Hunts a mutant: plays schedules until the checker reports something."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from tests.racecheck.mutants import applied
from tests.racecheck.paths import PATHS
from tests.racecheck.schedules import TIER_PATHS, play

if TYPE_CHECKING:
    from tests.racecheck.mutants import Mutant
    from tests.racecheck.paths import Bench

# Mutants that change nothing which the promise is about, and why.
KNOWN: Final[dict[str, str]] = {}


# A schedule of a tier alone takes a hundredth of a second, one of a training step several times as long.
SEEDS_A_ROUND: Final = 5


def hunt(bench: Bench, mutant: Mutant, *, most_seeds: int) -> str | None:
    """Return the path, the seed and the first report; None if nothing was found.

    Args:
        bench: The device.
        mutant: What is removed.
        most_seeds: Play so many schedules of each training step at most, and SEEDS_A_ROUND times as many of each path
            of a tier alone.
    """
    with applied(mutant):
        for number in range(most_seeds):
            tier_seeds = range(number * SEEDS_A_ROUND, (number + 1) * SEEDS_A_ROUND)
            for path, seed in (*itertools.product(TIER_PATHS, tier_seeds), *((path, number) for path in PATHS)):
                shown = play(bench, path, seed)
                if shown.found:
                    return f"{'/'.join(path)}, seed {seed}: {shown.found[0]}"
    return None
