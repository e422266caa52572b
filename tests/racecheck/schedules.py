"""All paths by name, and one random schedule of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.racecheck.paths import PATHS
from tests.racecheck.tier_paths import SHORT, TIERS, play_calls, play_short

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench, Play

    Path = tuple[str, ...]

# The short ones first: a hunt for a mutant ends at the first path that shows it.
TIER_PATHS: Final[tuple[Path, ...]] = tuple((name,) for name in (*SHORT, *TIERS))
ALL_PATHS: Final[tuple[Path, ...]] = (*TIER_PATHS, *PATHS)


def play(bench: Bench, path: Path, seed: int) -> Play:
    """Play one random schedule of a path."""
    if path[0] in SHORT:
        return play_short(bench, path[0], seed)
    if path[0] in TIERS:
        return play_calls(bench, path[0], seed)
    model, budget = path
    return bench.play(model, budget, seed)
