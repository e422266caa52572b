"""Places a buffer can go to, by name: each is a `Tier`, and the runtime knows no more of them than that.

"disk" and "memory" serve tensors in host memory. Pinned host memory for CUDA joins `_OPENERS` under its own name: it
implements `Tier` on its own arena, side streams and events, and can take `slots.SlotAllocator` for the arena.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from torchdelta.errors import TierError
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

if TYPE_CHECKING:
    import os

__all__ = ["Slot", "Tier", "Transfer", "open_tier", "tier_names"]


class _Opener(Protocol):
    def __call__(
        self,
        *,
        swap_dir: str | os.PathLike[str] | None,
        host_budget_bytes: int | None,
        disk_budget_bytes: int | None,
    ) -> Tier: ...


def _open_disk(
    *, swap_dir: str | os.PathLike[str] | None, host_budget_bytes: int | None, disk_budget_bytes: int | None
) -> Tier:
    from torchdelta.runtime.tiers.disk import DiskTier

    return DiskTier(swap_dir=swap_dir, capacity_bytes=disk_budget_bytes, host_budget_bytes=host_budget_bytes)


def _open_memory(
    *, swap_dir: str | os.PathLike[str] | None, host_budget_bytes: int | None, disk_budget_bytes: int | None
) -> Tier:
    from torchdelta.runtime.tiers.memory import MemoryTier

    del swap_dir, disk_budget_bytes  # nothing of this tier is on a disk
    return MemoryTier(capacity_bytes=host_budget_bytes)


_OPENERS: Final[dict[str, _Opener]] = {"disk": _open_disk, "memory": _open_memory}


def tier_names() -> tuple[str, ...]:
    """Return the names that `open_tier` knows."""
    return tuple(_OPENERS)


def open_tier(
    name: str,
    *,
    swap_dir: str | os.PathLike[str] | None = None,
    host_budget_bytes: int | None = None,
    disk_budget_bytes: int | None = None,
) -> Tier:
    """Open a tier; the caller closes it.

    Args:
        name: One of `tier_names()`.
        swap_dir: Directory for tiers on disk; None means TORCHDELTA_SWAP_DIR, else the system's for temporary files.
        host_budget_bytes: The most host memory that the tier may hold, staging included; None for no limit.
        disk_budget_bytes: The most disk space that it may hold; None for no limit.

    Raises:
        TierError: There is no such tier, or it cannot be opened here: one line that says why and what to change.
    """
    opener = _OPENERS.get(name)
    if opener is None:
        raise TierError(f"there is no tier {name!r}; take one of {', '.join(map(repr, _OPENERS))}")
    return opener(swap_dir=swap_dir, host_budget_bytes=host_budget_bytes, disk_budget_bytes=disk_budget_bytes)
