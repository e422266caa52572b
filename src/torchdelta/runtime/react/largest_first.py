"""The largest buffer leaves first, by whichever action is cheaper for it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.react.director import cheaper_alone

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer
    from torchdelta.runtime.react.base import Action, Costs


class LargestFirst:
    """Largest first; the older one among equals."""

    name = "largest-first"

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Most bytes first."""
        ordered = sorted(candidates, key=lambda buffer: (-buffer.size_bytes, buffer.last_used, buffer.id))
        return [(buffer, cheaper_alone(buffer, costs)) for buffer in ordered]
