"""Counts what a session has done. Mutable; summary.py makes an immutable copy for the user."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since the session began."""

    num_ops: int = 0
    num_saved: int = 0
    saved_bytes: int = 0
    left_bytes: int = 0  # of saved buffers that were evicted, each counted once
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    dropped_bytes: int = 0
    recomputed_bytes: int = 0
    num_recomputed_ops: int = 0
    num_evictions: int = 0
    num_copies_before_write: int = 0
    num_unplanned: int = 0  # times that room had to be made beyond what a followed program does
    stall_s: float = 0.0
    recompute_s: float = 0.0
    op_time_s: float = 0.0  # of the program's own ops that are recorded; replays are not in it
    evict_s: float = 0.0  # choosing what leaves, and starting its copies; waits and replays are not in it

    @property
    def lost_s(self) -> float:
        """The seconds that the budget has cost, as far as they are counted."""
        return self.stall_s + self.recompute_s + self.evict_s

    def minus(self, earlier: Counters) -> Counters:
        """Return the difference to an earlier copy."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> Counters:
        """Return a copy of the current totals."""
        return Counters(**{f.name: getattr(self, f.name) for f in fields(self)})
