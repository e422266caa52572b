"""The director's simplest question, which several policies share.

Which action is cheaper for a buffer looked at alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.react.base import Action, Costs

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer


def cheaper_alone(buffer: Buffer, costs: Costs) -> Action:
    """Compare the buffer's own op time with its copy out and back; chains and links' queues are ignored."""
    own_s = costs.own_time_s(buffer)
    if buffer.copy is not None or not costs.can_swap:
        return Action.SWAP if buffer.copy is not None else Action.DROP
    return Action.SWAP if costs.swap_time_s(buffer) < own_s else Action.DROP
