"""The default.

DELTA's filter and director with one unit of time and the missing chain charged.

Score = cheapest way back (seconds) / (bytes x staleness), lowest leaves first. The way back is the recomputation of the
buffer and of all missing above it, or its copies out and back. Known weaknesses: transfer time is
charged in full, also what will be hidden behind compute (what transfers exposed is counted but not yet learned from); a
choice is priced alone, so that a group which leaves together and shares a chain is priced several times;
the planned policies exist for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.react.base import Action, Costs

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer


class TorchdeltaPolicy:
    """Cheapest way back per byte and staleness."""

    name = "torchdelta"

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by rising score."""
        clock = costs.clock
        scored: list[tuple[float, int, Buffer, Action]] = []
        for buffer in candidates:
            recompute_s = costs.missing_time_s(buffer) if buffer.copy is None else float("inf")
            swap_s = costs.swap_time_s(buffer) if costs.can_swap or buffer.copy is not None else float("inf")
            way_back_s, action = (recompute_s, Action.DROP) if recompute_s <= swap_s else (swap_s, Action.SWAP)
            scored.append(
                (way_back_s / (buffer.size_bytes * (clock - buffer.last_used + 1)), buffer.id, buffer, action)
            )
        scored.sort(key=lambda item: item[:2])
        return [(buffer, action) for _, _, buffer, action in scored]
