"""Recompute only, and swap only: one action for every buffer where it is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs, recompute_first

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class RecomputeOnly:
    """Recompute the cheapest buffers first; those that cannot be recomputed come last and are swapped."""

    name = "recompute-only"
    may_swap = False

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by rising recompute time per byte and staleness."""
        clock = costs.clock
        return recompute_first(
            candidates, lambda b: costs.missing_time_s(b) / (b.size_bytes * (clock - b.last_used + 1))
        )


class SwapOnly:
    """Swap the buffers that were saved first: backward needs them last."""

    name = "swap-only"
    may_swap = True

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates in the order in which they were saved."""
        del costs
        return [
            (buffer, Action.SWAP) for buffer in sorted(candidates, key=lambda buffer: (buffer.save_order, buffer.id))
        ]
