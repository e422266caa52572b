"""The disk tier of a device: its bytes pass through pinned staging buffers, part by part, on their way to the file.

The disk tier's own threads do it: each takes a part, has the device copy it into the thread's staging buffer, and
writes that; and back the same way. While one thread waits for the disk, the device copies for the other. So host memory
is two parts and no more, whatever a buffer's size, and all else (order, failure, full disks, checksums) is the disk
tier's, see `disk` and `copier`.

The order on the device is that of [Note: stream order] in pinned.py, with one difference: threads see to it that a copy
is over before they report it, so `wait()` blocks the host, and returns for how long.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchdelta.errors import TierError
from torchdelta.runtime.tiers.arena import PinnedMemory
from torchdelta.runtime.tiers.disk import DiskMedium
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.pooled import PooledTier
from torchdelta.runtime.tiers.scratch import open_scratch_file, swap_directory

if TYPE_CHECKING:
    import mmap

    import torch

    from torchdelta.runtime.tiers.copier import Part, PooledSlot
    from torchdelta.runtime.tiers.engine import Engine
    from torchdelta.runtime.tiers.scratch import ScratchFile

__all__ = ["BouncedDiskTier"]


class _BouncedMedium(DiskMedium):
    """A scratch file whose staging buffers the device fills and empties."""

    _always_stages = True

    def __init__(
        self,
        scratch: ScratchFile,
        engine: Engine,
        *,
        host_budget_bytes: int | None,
        checksum: bool,
    ) -> None:
        self._engine = engine
        self._memory = PinnedMemory(engine)
        try:
            super().__init__(scratch, host_budget_bytes=host_budget_bytes, checksum=checksum)
        except BaseException:
            self._memory.close()
            raise

    def _new_staging(self, size_bytes: int) -> mmap.mmap:
        return self._memory.take(size_bytes).mapping

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


class BouncedDiskTier(PooledTier):
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
        scratch = open_scratch_file(swap_directory(swap_dir), capacity_bytes=capacity_bytes)
        try:
            medium = _BouncedMedium(scratch, engine, host_budget_bytes=host_budget_bytes, checksum=checksum)
        except BaseException as error:
            os.close(scratch.descriptor)
            if isinstance(error, OSError):
                raise TierError(f"the disk tier has no memory for staging: {error.strerror or error}") from error
            raise
        super().__init__(medium, capacity_bytes=capacity_bytes, device=engine.device)

    def _cut(self, slot: PooledSlot, storage: torch.UntypedStorage) -> list[Part]:
        parts = super()._cut(slot, storage)
        if parts:
            after = self._engine.mark(Stream.COMPUTE)
            for part in parts:
                part.after = after
        return parts
