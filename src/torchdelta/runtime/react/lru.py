"""Least recently used leaves first, by whichever action is cheaper for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.react.director import cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer
    from torchdelta.runtime.react.base import Action, Costs


class LeastRecentlyUsed:
    """LRU."""

    name = "lru"

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Oldest use first."""
        return [
            (buffer, cheaper_alone(buffer, costs))
            for buffer in sorted(candidates, key=lambda buffer: (buffer.last_used, buffer.id))
        ]
