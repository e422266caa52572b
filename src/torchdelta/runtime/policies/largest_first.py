"""Evict the largest buffer first, by the action that is cheaper for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs, cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class LargestFirst:
    """Largest first; among equals the least recently used."""

    name = "largest-first"
    may_swap = True

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by falling bytes."""
        ordered = sorted(candidates, key=lambda buffer: (-buffer.size_bytes, buffer.last_used, buffer.id))
        return [(buffer, cheaper_alone(buffer, costs)) for buffer in ordered]
