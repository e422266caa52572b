"""Evict the least recently used buffer first, by the action that is cheaper for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs, cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class LeastRecentlyUsed:
    """LRU."""

    name = "lru"
    may_swap = True

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by last use, oldest first."""
        return [
            (buffer, cheaper_alone(buffer, costs))
            for buffer in sorted(candidates, key=lambda buffer: (buffer.last_used, buffer.id))
        ]
