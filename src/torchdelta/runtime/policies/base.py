"""The interface of the reactive policies: when room is needed, rank the buffers to evict, each with an action.

A policy is the *filter* and the *director* of DELTA (2022) in one function: it returns buffers in the order in which
they should be evicted, each with its action. runtime/memory/ checks whether an eviction frees memory, and falls back to
the other action if one is impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torchdelta.runtime.policies.action import Action

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer

__all__ = ["Action", "Costs", "Policy"]


class Costs(Protocol):
    """What a policy may query about the present state."""

    @property
    def clock(self) -> int:
        """Ops so far; `clock - buffer.last_used` is a buffer's staleness in ops."""
        ...

    @property
    def can_swap(self) -> bool:
        """Whether the tier has room."""
        ...

    def swap_time_s(self, buffer: Buffer) -> float:
        """Seconds to copy the buffer out (unless the tier has a copy) and back, on an idle link."""
        ...

    def own_time_s(self, buffer: Buffer) -> float:
        """Seconds that the op which made the buffer took; infinite if it cannot be replayed."""
        ...

    def missing_time_s(self, buffer: Buffer, /) -> float:
        """Seconds to recompute the buffer now: its op and all ops of missing sources; infinite if impossible."""
        ...

    def dropped(self) -> list[Buffer]:
        """Evicted buffers that would be recomputed."""
        ...


class Policy(Protocol):
    """A way to choose which buffers are evicted."""

    name: str

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return buffers and actions, in the order of eviction.

        Every candidate should be included: a buffer that is left out is never evicted.
        """
        ...
