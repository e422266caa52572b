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

# Removed waits after which every content is still right, and why.
KNOWN: Final[dict[str, str]] = {
    "memory.transfers:Transfers.read#0": "the tier itself orders a copy in after the copy out of its slot",
    "memory.transfers:Transfers.cancel_fetches#0": "the tier holds the target until its copy ends: it is freed later",
    "tiers.pooled:PooledTier.check_readable#0": "what it reads is not kept; tests/runtime/tiers/ need it",
    "state.copies:TierCopy.is_there#0": "chooses between waiting now and later: the release waits anyway",
}

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
