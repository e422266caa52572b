"""Copies of a buffer's content on a tier, and the transfers that bring one back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.errors import TierError
from torchdelta.runtime.interrupts import destructor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

__all__ = ["Emptied", "Fetch", "SurveyedCopy", "TierCopy"]


class TierCopy:
    """A buffer's content on a tier. The slot is released when this object dies."""

    __slots__ = ("slot", "source", "tier", "transfer")

    def __init__(self, tier: Tier, slot: Slot, transfer: Transfer | None, source: torch.UntypedStorage) -> None:
        self.tier = tier
        self.slot = slot
        self.transfer = transfer  # the copy in progress; None once it has arrived
        self.source: torch.UntypedStorage | None = source  # what is copied; kept alive until the copy has arrived

    def is_there(self) -> bool:
        """Return whether the content has arrived, without waiting."""
        return self.transfer is None or self.transfer.is_done()

    def arrive(self) -> float:
        """Wait until the content has arrived.

        Returns:
            The seconds waited.

        Raises:
            TierIOError: The copy failed.
        """
        if self.transfer is None:
            return 0.0
        try:
            stall_s = self.transfer.wait()
        except TierError:
            self.transfer = self.source = None
            raise
        # Not in a `finally`: after a KeyboardInterrupt in the wait, the copy is still in progress.
        self.transfer = self.source = None
        return stall_s

    @destructor
    def __del__(self) -> None:
        # Never wait here: the garbage collector may call this while the tier's own lock is held. The tier keeps the
        # storage alive until its copy has ended.
        self.tier.release(self.slot)


class SurveyedCopy(TierCopy):
    """The copy that a survey pretends to make. It has no content.

    Args:
        size_bytes: What it would take on the tier.
        on_death: Called with these bytes when it would be released.
    """

    __slots__ = ("on_death", "size_bytes")

    def __init__(self, size_bytes: int, on_death: Callable[[int], None]) -> None:
        self.transfer = self.source = None
        self.size_bytes = size_bytes
        self.on_death = on_death

    @destructor
    def __del__(self) -> None:
        self.on_death(self.size_bytes)


class Fetch:
    """A transfer that brings a buffer back. The tier keeps the target storage alive until it has ended."""

    __slots__ = ("copy", "storage", "transfer")

    def __init__(self, copy: TierCopy, storage: torch.UntypedStorage) -> None:
        self.copy = copy
        self.storage = storage
        self.transfer: Transfer = copy.tier.read(copy.slot, storage)


class Emptied:
    """The copy of a storage whose memory was freed in place, or can be without a transfer (a *spare* copy).

    Args:
        copy: The content on a tier.
        size_bytes: The size of the storage.
        content: Which content it is (a `Buffer`), if that is known. A storage with another one was written since.

    Attributes:
        transfer: The read that fills the storage again. None: there is none now.
        is_read: Whether the storage has been filled again.
    """

    __slots__ = ("content", "copy", "is_read", "size_bytes", "transfer")

    def __init__(self, copy: TierCopy, size_bytes: int, content: object | None) -> None:
        self.copy = copy
        self.size_bytes = size_bytes
        self.content = content
        self.transfer: Transfer | None = None
        self.is_read = False
