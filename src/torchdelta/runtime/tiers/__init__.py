"""The places that a buffer can be evicted to, by name. Each is a `Tier`; the runtime uses nothing but that interface.

| name | for tensors on the CPU | for tensors on a device with streams (CUDA) |
|---|---|---|
| "memory" | a copy in host memory | pinned host memory |
| "disk" | a file | pinned host memory up to `host_budget`, then a file |
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from torchdelta.errors import TierError
from torchdelta.host import num_processes_here, read_host_memory
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torchdelta.runtime.tiers.engine import Engine

__all__ = ["ENGINES", "Slot", "Tier", "Transfer", "open_tier", "tier_names"]

# Pinned memory cannot be paged out, and pinning all of it stops the machine. This is the limit without a budget.
_PINNED_SHARE: Final = 0.5
_DISK_STAGING_BYTES: Final = 8 << 20  # one part for each of two threads


class _Options(NamedTuple):
    swap_dir: str | os.PathLike[str] | None
    host_budget_bytes: int | None
    disk_budget_bytes: int | None
    checksum: bool


def _open_disk(options: _Options) -> Tier:
    from torchdelta.runtime.tiers.disk import DiskTier

    return DiskTier(
        swap_dir=options.swap_dir,
        capacity_bytes=options.disk_budget_bytes,
        host_budget_bytes=options.host_budget_bytes,
        checksum=options.checksum,
    )


def _open_memory(options: _Options) -> Tier:
    from torchdelta.runtime.tiers.memory import MemoryTier

    return MemoryTier(capacity_bytes=options.host_budget_bytes)


def _open_pinned(options: _Options, engine: Engine) -> Tier:
    from torchdelta.runtime.tiers.pinned import PinnedTier

    return PinnedTier(engine, capacity_bytes=_pinned_bytes(options))


def _open_pinned_and_disk(options: _Options, engine: Engine) -> Tier:
    from torchdelta.runtime.tiers.bounced import BouncedDiskTier
    from torchdelta.runtime.tiers.pinned import PinnedTier
    from torchdelta.runtime.tiers.stacked import StackedTier

    host_bytes = _pinned_bytes(options)
    # An eighth for staging: at most what the disk tier uses, and at least a page, which it needs.
    staging_bytes = min(_DISK_STAGING_BYTES, max(mmap.PAGESIZE, host_bytes // 8))
    disk = BouncedDiskTier(
        engine,
        swap_dir=options.swap_dir,
        capacity_bytes=options.disk_budget_bytes,
        host_budget_bytes=min(staging_bytes, host_bytes),
        checksum=options.checksum,
    )
    return StackedTier("disk", PinnedTier(engine, capacity_bytes=host_bytes - disk.staging_bytes), disk)


def _pinned_bytes(options: _Options) -> int:
    if options.host_budget_bytes is not None:
        return options.host_budget_bytes
    # Where a container's limit is used up, there is still what the disk tier needs.
    return max(_DISK_STAGING_BYTES, int(read_host_memory().free_bytes * _PINNED_SHARE) // num_processes_here())


def _cuda_engine(device: torch.device) -> Engine:
    from torchdelta.runtime.tiers.cuda import CudaEngine

    return CudaEngine(device)


_CPU_OPENERS: Final[dict[str, Callable[[_Options], Tier]]] = {"disk": _open_disk, "memory": _open_memory}
_DEVICE_OPENERS: Final[dict[str, Callable[[_Options, Engine], Tier]]] = {
    "disk": _open_pinned_and_disk,
    "memory": _open_pinned,
}
# The engine for each device type that has streams; tests add their own.
ENGINES: Final[dict[str, Callable[[torch.device], Engine]]] = {"cuda": _cuda_engine}


def tier_names() -> tuple[str, ...]:
    """Return the names that `open_tier` knows."""
    return tuple(_CPU_OPENERS)


def open_tier(
    name: str,
    *,
    device: torch.device | None = None,
    swap_dir: str | os.PathLike[str] | None = None,
    host_budget_bytes: int | None = None,
    disk_budget_bytes: int | None = None,
    checksum: bool = False,
) -> Tier:
    """Open a tier. The caller closes it.

    Args:
        name: One of `tier_names()`.
        device: The device whose tensors it takes. Without an index: the current device of that type. None: the CPU.
        swap_dir: Directory for tiers on disk. None: TORCHDELTA_SWAP_DIR, else the system's temporary directory.
        host_budget_bytes: The most host memory that the tier may hold, staging included. None: no limit, but half of
            the free memory where it is pinned.
        disk_budget_bytes: The most disk space that it may hold. None: no limit.
        checksum: Whether to verify a checksum of every part that is read from disk.

    Raises:
        TierError: There is no such tier, or it cannot be opened here. One line states the reason and the remedy.
    """
    if name not in _CPU_OPENERS:
        raise TierError(f"there is no tier {name!r}; take one of {', '.join(map(repr, _CPU_OPENERS))}")
    options = _Options(swap_dir, host_budget_bytes, disk_budget_bytes, checksum)
    if device is None or device.type not in ENGINES:
        return _CPU_OPENERS[name](options)
    if device.type != "cpu" and ":" not in str(device):  # (torch's annotations say that an index is never None)
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _DEVICE_OPENERS[name](options, ENGINES[device.type](device))
