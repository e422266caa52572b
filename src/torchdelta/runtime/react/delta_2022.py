"""DELTA (arXiv 2203.15980), literal.

Filter by bytes x staleness, director by 2 x bytes / bandwidth against the op's own time.

The filter's score and the comparison are those of the paper's abstract and of the authors' code (papers.md 1.2), with
equal units on both sides (the published code compared microseconds with nanoseconds and so always swapped). Neighbours
and chains are not considered, nor is overlap. Evicting before the allocation and not after it is the runtime's doing,
for every policy alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.react.director import cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer
    from torchdelta.runtime.react.base import Action, Costs


class Delta2022:
    """Largest bytes x staleness leaves first."""

    name = "delta-2022"

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by falling bytes x staleness."""
        clock = costs.clock
        ordered = sorted(
            candidates, key=lambda buffer: (-buffer.size_bytes * (clock - buffer.last_used + 1), buffer.id)
        )
        return [(buffer, cheaper_alone(buffer, costs)) for buffer in ordered]
