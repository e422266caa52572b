"""The seam of the reactive policies: when room is needed, rank who leaves and how.

A policy is the *filter* and the *director* of DELTA (2022) in one function: it returns buffers in the order in which
they should leave, each with the action by which it leaves. Whether an eviction frees anything, and the fallback when an
action is impossible, are residency.py's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torchdelta.runtime.action import Action

if TYPE_CHECKING:
    from torchdelta.runtime.buffer import Buffer

__all__ = ["Action", "Costs", "Policy"]


class Costs(Protocol):
    """What a policy may ask about the present."""

    @property
    def clock(self) -> int:
        """Ops so far; `clock - buffer.last_used` is a buffer's staleness in ops."""
        ...

    @property
    def can_swap(self) -> bool:
        """Whether the tier takes more."""
        ...

    def swap_time_s(self, buffer: Buffer) -> float:
        """Seconds for the copy out (unless a copy is there) and back, on an idle link."""
        ...

    def own_time_s(self, buffer: Buffer) -> float:
        """Seconds that the op which made the buffer took; infinite when it cannot be run again."""
        ...

    def missing_time_s(self, buffer: Buffer, /) -> float:
        """Seconds to make the buffer again now: its own op and every missing op above it; infinite when impossible."""
        ...

    def dropped(self) -> list[Buffer]:
        """Buffers that are away and would be recomputed."""
        ...


class Policy(Protocol):
    """A way to choose who leaves."""

    name: str

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return buffers and actions, first to leave first.

        Every candidate should be in it: what is left out stays whatever happens.
        """
        ...
