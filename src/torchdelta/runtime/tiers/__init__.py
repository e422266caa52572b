"""Places a buffer can go to, by name: each is a `Tier`, and the runtime knows no more of them than that.

| name | for tensors on the CPU | for tensors on a device with streams (CUDA) |
|---|---|---|
| "memory" | a copy in host memory | pinned host memory |
| "disk" | a file | pinned host memory as far as `host_budget` allows, and a file behind it |
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from torchdelta.errors import TierError
from torchdelta.host import read_host_memory
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.tiers.engine import Engine

__all__ = ["ENGINES", "Slot", "Tier", "Transfer", "open_tier", "tier_names"]

# Pinned memory cannot be paged out, so that taking all of it stops the machine: without a budget it ends here.
_PINNED_SHARE: Final = 0.5
_NUM_PROCESSES: Final = "LOCAL_WORLD_SIZE"  # what torchrun says of the processes on this machine
_DISK_STAGING_BYTES: Final = 8 << 20  # two threads, a part each


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
    # An eighth for staging, and no more than the disk makes use of; but a page at least, which the disk insists on.
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
    memory = read_host_memory()
    free_bytes = min(memory.usable_bytes, memory.available_bytes or memory.usable_bytes)
    num_processes = os.environ.get(_NUM_PROCESSES, "")
    return int(free_bytes * _PINNED_SHARE) // max(1, int(num_processes) if num_processes.isdecimal() else 1)


def _cuda_engine(device: torch.device) -> Engine:
    from torchdelta.runtime.tiers.cuda import CudaEngine

    return CudaEngine(device)


_CPU_OPENERS: Final[dict[str, Callable[[_Options], Tier]]] = {"disk": _open_disk, "memory": _open_memory}
_DEVICE_OPENERS: Final[dict[str, Callable[[_Options, Engine], Tier]]] = {
    "disk": _open_pinned_and_disk,
    "memory": _open_pinned,
}
# What drives a device of each type that has streams; tests add their own.
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
    """Open a tier; the caller closes it.

    Args:
        name: One of `tier_names()`.
        device: Whose tensors it takes; without an index the current one of its kind, and None is the CPU.
        swap_dir: Directory for tiers on disk; None means TORCHDELTA_SWAP_DIR, else the system's for temporary files.
        host_budget_bytes: The most host memory that the tier may hold, staging included; None for no limit, or for half
            of what is free where the memory is pinned.
        disk_budget_bytes: The most disk space that it may hold; None for no limit.
        checksum: Whether what comes back from a disk is compared with a checksum of what went there.

    Raises:
        TierError: There is no such tier, or it cannot be opened here: one line that says why and what to change.
    """
    if name not in _CPU_OPENERS:
        raise TierError(f"there is no tier {name!r}; take one of {', '.join(map(repr, _CPU_OPENERS))}")
    options = _Options(swap_dir, host_budget_bytes, disk_budget_bytes, checksum)
    if device is None or device.type not in ENGINES:
        return _CPU_OPENERS[name](options)
    if device.type != "cpu" and ":" not in str(device):  # (torch's annotations say that an index is never None)
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _DEVICE_OPENERS[name](options, ENGINES[device.type](device))
