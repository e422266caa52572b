"""Hunts a mutant: plays schedules until the checker reports something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.racecheck.mutants import applied
from tests.racecheck.schedules import ALL_PATHS, play

if TYPE_CHECKING:
    from tests.racecheck.mutants import Mutant
    from tests.racecheck.paths import Bench

# Mutants that change nothing which the promise is about, and why.
KNOWN: Final[dict[str, str]] = {}


def hunt(bench: Bench, mutant: Mutant, *, most_seeds: int) -> str | None:
    """Return the path, the seed and the first report; None if nothing was found."""
    with applied(mutant):
        for seed in range(most_seeds):
            for path in ALL_PATHS:
                shown = play(bench, path, seed)
                if shown.found:
                    return f"{'/'.join(path)}, seed {seed}: {shown.found[0]}"
    return None
