"""The disk tier of a device: bytes pass through pinned staging buffers, part by part, between the device and the file.

The threads of the disk tier do this. To write, each takes a part, has the device copy it into the thread's staging
buffer, and writes that buffer to the file; to read, the reverse. While one thread waits for the disk, the device copies
for the other. So the tier holds two parts of host memory, whatever a buffer's size. Order, failures, full disks and
checksums are those of the disk tier, see `disk` and `copier`.

The order on the device is that of [Note: stream order] in pinned.py, with one difference: the threads wait for a copy
to end before they report it, so `wait()` blocks the host and returns the seconds that it blocked.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torchdelta.runtime.tiers.arena import PinnedMemory
from torchdelta.runtime.tiers.disk import DiskMedium, DiskTier
from torchdelta.runtime.tiers.engine import Stream

if TYPE_CHECKING:
    import os

    import torch

    from torchdelta.runtime.tiers.arena import Segment
    from torchdelta.runtime.tiers.engine import Engine
    from torchdelta.runtime.tiers.jobs import Part, PooledSlot
    from torchdelta.runtime.tiers.scratch import ScratchFile

__all__ = ["BouncedDiskTier"]


class _BouncedMedium(DiskMedium):
    """A scratch file; the device copies to and from its staging buffers."""

    _always_stages = True

    def __init__(self, engine: Engine, scratch: ScratchFile, *, host_budget_bytes: int | None, checksum: bool) -> None:
        self._engine = engine
        self._memory = PinnedMemory(engine)
        try:
            super().__init__(scratch, host_budget_bytes=host_budget_bytes, checksum=checksum)
        except BaseException:
            self._memory.close()
            raise

    def _new_staging(self, size_bytes: int) -> Segment:
        return self._memory.take(size_bytes)

    def _stage(self, part: Part, staging_address: int) -> None:
        self._copy(Stream.OUT, part, to_address=staging_address, from_address=part.address)

    def _unstage(self, part: Part, staging_address: int) -> None:
        self._copy(Stream.IN, part, to_address=part.address, from_address=staging_address)

    def _copy(self, stream: Stream, part: Part, *, to_address: int, from_address: int) -> None:
        engine = self._engine
        engine.follow(stream, part.after)
        engine.copy(stream, to_address=to_address, from_address=from_address, size_bytes=part.size_bytes)
        engine.finish(engine.mark(stream))

    def _drop_staging(self) -> None:
        self._memory.close()  # unpins, and unmaps


class BouncedDiskTier(DiskTier):
    """A nameless file as a tier for the storages of one device.

    Args:
        engine: The device.
        swap_dir, capacity_bytes, host_budget_bytes, checksum: As for `disk.DiskTier`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        swap_dir: str | os.PathLike[str] | None = None,
        capacity_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        checksum: bool = False,
    ) -> None:
        self._engine = engine
        super().__init__(
            swap_dir=swap_dir,
            capacity_bytes=capacity_bytes,
            host_budget_bytes=host_budget_bytes,
            checksum=checksum,
            device=engine.device,
            new_medium=functools.partial(_BouncedMedium, engine),
        )

    def _cut(self, slot: PooledSlot, storage: torch.UntypedStorage) -> list[Part]:
        parts = super()._cut(slot, storage)
        if parts:
            after = self._engine.mark(Stream.COMPUTE)
            for part in parts:
                part.after = after
        return parts
