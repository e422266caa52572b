"""The interface of the reactive policies: when room is needed, rank the buffers to evict, each with an action.

A policy is the *filter* and the *director* of DELTA (2022) in one function: it returns buffers in the order in which
they should be evicted, each with its action. runtime/memory/ checks whether an eviction frees memory, and falls back to
the other action if one is impossible.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.buffer import Buffer

__all__ = ["Action", "Costs", "Policy", "cheaper_alone", "recompute_first"]


class Action(enum.Enum):
    """The two ways to evict a buffer. The values are the words of `Config(decisions=...)`."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


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
    """A way to choose which buffers are evicted.

    Attributes:
        name: Its name in `Config(policy=...)`.
        may_swap: Whether a buffer that can be recomputed is swapped instead where its replay would not fit.
    """

    name: str
    may_swap: bool

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return buffers and actions, in the order of eviction.

        Every candidate should be included: a buffer that is left out is never evicted.
        """
        ...


def recompute_first(candidates: list[Buffer], score: Callable[[Buffer], float]) -> list[tuple[Buffer, Action]]:
    """Return what can be recomputed by rising score, and then the others, which are swapped."""
    able = sorted((b for b in candidates if b.op is not None), key=lambda b: (score(b), b.id))
    return [(b, Action.RECOMPUTE) for b in able] + [(b, Action.SWAP) for b in candidates if b.op is None]


def cheaper_alone(buffer: Buffer, costs: Costs) -> Action:
    """Return the cheaper action for one buffer: the simplest director, which several policies share.

    Compare the buffer's own op time with its copies out and back; ignore chains and the queues of links.
    """
    own_s = costs.own_time_s(buffer)
    if buffer.copy is not None or not costs.can_swap:
        return Action.SWAP if buffer.copy is not None else Action.RECOMPUTE
    return Action.SWAP if costs.swap_time_s(buffer) < own_s else Action.RECOMPUTE
