"""What a session has done, in numbers; mutable, and read by summary.py's immutable picture of it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since the session began."""

    num_ops: int = 0
    num_saved: int = 0
    kept_bytes: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    dropped_bytes: int = 0
    recomputed_bytes: int = 0
    num_recomputed_ops: int = 0
    num_evictions: int = 0
    num_copies_before_write: int = 0
    stall_s: float = 0.0
    recompute_s: float = 0.0

    def minus(self, earlier: Counters) -> Counters:
        """Return what was added since `earlier`."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> Counters:
        """Return these numbers as they are now."""
        return Counters(**{f.name: getattr(self, f.name) for f in fields(self)})
