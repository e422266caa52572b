"""The default policy: DELTA's filter and director, in one unit of time, and counting the replay of missing sources.

Score = seconds of the cheaper way back / (bytes x staleness); the lowest score is evicted first. The ways back are to
recompute the buffer and all its missing sources, or to copy it out and back. Known weaknesses: transfer time is charged
in full, even if compute will hide it (exposed transfers are counted, but not yet used here). Each choice is priced
alone, so that buffers which are evicted together and share a chain are charged for it several times; the planned
policies avoid that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class TorchdeltaPolicy:
    """Cheapest way back per byte and staleness."""

    name = "torchdelta"
    may_swap = True

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by rising score."""
        clock = costs.clock
        scored: list[tuple[float, int, Buffer, Action]] = []
        for buffer in candidates:
            recompute_s = costs.missing_time_s(buffer) if buffer.copy is None else float("inf")
            swap_s = costs.swap_time_s(buffer) if costs.can_swap or buffer.copy is not None else float("inf")
            way_back_s, action = (recompute_s, Action.RECOMPUTE) if recompute_s <= swap_s else (swap_s, Action.SWAP)
            scored.append(
                (way_back_s / (buffer.size_bytes * (clock - buffer.last_used + 1)), buffer.id, buffer, action)
            )
        scored.sort(key=lambda item: item[:2])
        return [(buffer, action) for _, _, buffer, action in scored]
