"""Two tiers as one: a buffer for which the first has no room goes to the second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.errors import TierError, TierFullError
from torchdelta.runtime.tiers.base import Slot

if TYPE_CHECKING:
    import torch

    from torchdelta.runtime.tiers.base import Tier, Transfer

__all__ = ["StackedSlot", "StackedTier"]


class StackedSlot(Slot):
    """A slot of one of the two tiers."""

    __slots__ = ("inner", "owner", "tier")

    def __init__(self, owner: StackedTier, tier: Tier, inner: Slot) -> None:
        super().__init__(inner.size_bytes)
        self.owner = owner
        self.tier = tier
        self.inner = inner


class StackedTier:
    """A fast tier and a slower one; see `base.Tier`. A slot stays in the tier that it was reserved in.

    Args:
        name: The registered name.
        first: The tier that is used while it has room; closed with this one.
        second: The tier that is used when the first is full; closed with this one.
    """

    def __init__(self, name: str, first: Tier, second: Tier) -> None:
        self.name = name
        self.first = first
        self.second = second
        self._overflows = False  # whether the last slot was reserved in the second

    @property
    def used_bytes(self) -> int:
        """Bytes of all reserved slots in both."""
        return self.first.used_bytes + self.second.used_bytes

    @property
    def peak_used_bytes(self) -> int:
        """The sum of both peaks, which may have been at different times."""
        return self.first.peak_used_bytes + self.second.peak_used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """The sum of both budgets; None if either has no limit."""
        capacities_bytes = (self.first.capacity_bytes, self.second.capacity_bytes)
        return None if None in capacities_bytes else sum(filter(None, capacities_bytes))

    @property
    def staging_bytes(self) -> int:
        """Host memory that both hold for staging buffers."""
        return self.first.staging_bytes + self.second.staging_bytes

    @property
    def write_bytes_per_s(self) -> float:
        """The estimate of the tier that took the last slot, and probably takes the next."""
        return (self.second if self._overflows else self.first).write_bytes_per_s

    @property
    def read_bytes_per_s(self) -> float:
        """The estimate of the tier that took the last slot, and probably takes the next."""
        return (self.second if self._overflows else self.first).read_bytes_per_s

    @property
    def write_cpu_s_per_byte(self) -> float:
        """The estimate of the tier that took the last slot, and probably takes the next."""
        return (self.second if self._overflows else self.first).write_cpu_s_per_byte

    @property
    def read_cpu_s_per_byte(self) -> float:
        """The estimate of the tier that took the last slot, and probably takes the next."""
        return (self.second if self._overflows else self.first).read_cpu_s_per_byte

    def reserve(self, size_bytes: int) -> StackedSlot:
        """Reserve a slot in the first, else in the second."""
        try:
            slot = StackedSlot(self, self.first, self.first.reserve(size_bytes))
            self._overflows = False
        except TierFullError:
            slot = StackedSlot(self, self.second, self.second.reserve(size_bytes))
            self._overflows = True
        return slot

    def write(self, slot: Slot, storage: torch.UntypedStorage) -> Transfer:
        """Start copying `storage` into `slot`."""
        stacked = self._checked(slot)
        return stacked.tier.write(stacked.inner, storage)

    def read(self, slot: Slot, storage: torch.UntypedStorage) -> Transfer:
        """Start filling `storage` from `slot`."""
        stacked = self._checked(slot)
        return stacked.tier.read(stacked.inner, storage)

    def map_into(self, slot: Slot, storage: torch.UntypedStorage, keeper: object) -> bool:
        """Let an empty storage have the bytes of a slot as its memory, if its tier can."""
        stacked = self._checked(slot)
        return stacked.tier.map_into(stacked.inner, storage, keeper)

    def release(self, slot: Slot) -> None:
        """Give the slot back. Safe in finalizers."""
        stacked = self._checked(slot)
        stacked.tier.release(stacked.inner)

    def drain(self) -> None:
        """Wait for every transfer under way in both."""
        self.first.drain()
        self.second.drain()

    def take_stall_s(self) -> float:
        """Return the seconds of stall that have become known since the last call."""
        return self.first.take_stall_s() + self.second.take_stall_s()

    def close(self) -> None:
        """Close both."""
        try:
            self.first.close()
        finally:
            self.second.close()

    def _checked(self, slot: Slot) -> StackedSlot:
        if not isinstance(slot, StackedSlot) or slot.owner is not self:
            raise TierError(f"this slot of {slot.size_bytes} bytes does not belong to this {self.name} tier")
        return slot
