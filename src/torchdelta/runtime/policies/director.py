"""The simplest director, which several policies share: the cheaper action for each buffer alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


def cheaper_alone(buffer: Buffer, costs: Costs) -> Action:
    """Compare the buffer's own op time with its copies out and back; ignore chains and the queues of links."""
    own_s = costs.own_time_s(buffer)
    if buffer.copy is not None or not costs.can_swap:
        return Action.SWAP if buffer.copy is not None else Action.RECOMPUTE
    return Action.SWAP if costs.swap_time_s(buffer) < own_s else Action.RECOMPUTE
