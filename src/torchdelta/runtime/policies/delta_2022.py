"""DELTA (arXiv 2203.15980), literal.

Filter by bytes x staleness, director by 2 x bytes / bandwidth against the op's own time.

The filter's score and the comparison are those of the paper's abstract and of the authors' code (papers.md 1.2), with
equal units on both sides (the published code compared microseconds with nanoseconds and so always swapped). Neighbours,
chains and overlap are not considered. The runtime evicts before an allocation, not after it, for every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs, cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class Delta2022:
    """Evicts the largest bytes x staleness first."""

    name = "delta-2022"
    may_swap = True

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by falling bytes x staleness."""
        clock = costs.clock
        ordered = sorted(
            candidates, key=lambda buffer: (-buffer.size_bytes * (clock - buffer.last_used + 1), buffer.id)
        )
        return [(buffer, cheaper_alone(buffer, costs)) for buffer in ordered]
