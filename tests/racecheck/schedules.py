"""All paths by name, and one random schedule of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.racecheck.paths import PATHS
from tests.racecheck.tier_paths import TIERS, play_calls, play_interrupted

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench, Play

    Path = tuple[str, ...]

INTERRUPTED: Final = ("tier-interrupted",)
ALL_PATHS: Final[tuple[Path, ...]] = (*((name,) for name in TIERS), INTERRUPTED, *PATHS)


def play(bench: Bench, path: Path, seed: int) -> Play:
    """Play one random schedule of a path."""
    if path == INTERRUPTED:
        return play_interrupted(bench, seed)
    if len(path) == 1:
        return play_calls(bench, path[0], seed)
    model, budget = path
    return bench.play(model, budget, seed)
