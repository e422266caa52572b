"""Plays random schedules on a tier of a device, as the runtime would use it, and holds the tier to its word."""

import itertools
import random
from typing import Protocol

import torch

from torchdelta.errors import TierFullError
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer

ACTIONS = (
    "make",
    "make",
    "make",
    "evict",
    "evict",
    "arrive",
    "poll",
    "fetch",
    "fetch",
    "use",
    "use",
    "read beside",
    "drop fetch",
    "overwrite",
    "rewrite",
    "release",
    "drain",
)


class Device(Protocol):
    """What a schedule needs of a device; simulated, or CUDA (see `devices.py`)."""

    used_bytes: int
    budget_bytes: int
    complaints: list[str]

    def allocate(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Hand out memory within the budget."""
        ...

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        """Launch a kernel that makes a content."""
        ...

    def check(self, storage: torch.UntypedStorage, number: int) -> None:
        """Launch a kernel that compares with a content."""
        ...

    def settle(self) -> None:
        """Finish all work."""
        ...


class Life:
    """A buffer: its content's number, and where it is."""

    def __init__(self, size_bytes: int, number: int, storage: torch.UntypedStorage) -> None:
        self.size_bytes = size_bytes
        self.number = number
        self.storage: torch.UntypedStorage | None = storage
        self.slot: Slot | None = None
        self.leaving: Transfer | None = None
        self.fetch: tuple[Transfer, torch.UntypedStorage] | None = None
        self.beside: list[tuple[Transfer, torch.UntypedStorage, int]] = []


class Player:
    """Carries a schedule out: make, evict, bring back, use, overwrite, release, in any order.

    Args:
        tier: What is tried.
        device: Where the storages are.
        seed: Of what the schedule leaves open.
    """

    def __init__(self, tier: Tier, device: Device, seed: int) -> None:
        self.tier = tier
        self.device = device
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.lives: list[Life] = []
        self.num_stuck = 0  # allocations that found no room although everything possible had left

    def play(self, steps: list[tuple[str, int]]) -> None:
        """Do what the steps say, then bring everything back and look at it, then give everything up."""
        for action, size_bytes in steps:
            self.act(action, size_bytes)
            assert self.device.used_bytes <= self.device.budget_bytes
            self._check_tier()
        while self.lives:
            self._use(self.lives[-1])
            self._forget(self.lives[-1])
        self.tier.drain()
        assert self.device.used_bytes == 0, "a drained tier lets go of every storage"
        assert self.tier.used_bytes == 0
        self.device.settle()
        assert self.device.complaints == []

    def act(self, action: str, size_bytes: int) -> None:
        """Do one thing."""
        if action == "make":
            storage = self._allocate(size_bytes)
            if storage is not None:
                life = Life(size_bytes, next(self.numbers), storage)
                self.device.fill(storage, life.number)
                self.lives.append(life)
        elif action == "poll":
            for life in self.lives:
                if life.leaving is not None and life.leaving.is_done():
                    self._arrive(life)
        elif action == "drain":
            self.tier.drain()
        elif self.lives:
            life = self.random.choice(self.lives)
            getattr(self, "_" + action.replace(" ", "_"))(life)

    # -- one buffer

    def _evict(self, life: Life) -> bool:
        if life.storage is None or life.leaving is not None:
            return False
        if life.slot is None:
            used_bytes = self.tier.used_bytes
            try:
                life.slot = self.tier.reserve(life.size_bytes)
            except TierFullError:
                capacity_bytes = self.tier.capacity_bytes
                assert capacity_bytes is not None
                assert used_bytes + life.size_bytes + 4096 > capacity_bytes, "there was room"
                return False
            life.leaving = self.tier.write(life.slot, life.storage)
        else:
            life.storage = None  # its copy is there
        return True

    def _arrive(self, life: Life) -> None:
        if life.leaving is not None:
            life.leaving.wait()
            assert life.leaving.wait() == 0.0
            before_bytes = self.device.used_bytes
            life.leaving = life.storage = None
            assert self.device.used_bytes < before_bytes or life.size_bytes == 0, "what has arrived is let go of"

    def _fetch(self, life: Life) -> None:
        if life.storage is None and life.fetch is None and life.slot is not None:
            storage = self._allocate(life.size_bytes, but=life)
            if storage is not None and life.storage is None and life.fetch is None:
                life.fetch = (self.tier.read(life.slot, storage), storage)

    def _drop_fetch(self, life: Life) -> None:
        life.fetch = None  # without waiting for it

    def _use(self, life: Life) -> None:
        if life.fetch is not None and life.storage is None:
            transfer, life.storage = life.fetch
            life.fetch = None
            transfer.wait()
        if life.storage is None:
            assert life.slot is not None
            storage = self._allocate(life.size_bytes, but=life)
            if storage is None:
                self.num_stuck += 1
                return
            self.tier.read(life.slot, storage).wait()
            life.storage = storage
        self.device.check(life.storage, life.number)
        for transfer, storage, number in life.beside:
            transfer.wait()
            self.device.check(storage, number)
        life.beside.clear()

    def _read_beside(self, life: Life) -> None:
        if life.slot is not None:
            storage = self._allocate(life.size_bytes, but=life)
            if storage is not None and life.slot is not None:
                life.beside.append((self.tier.read(life.slot, storage), storage, life.number))

    def _overwrite(self, life: Life) -> None:
        """Write in place, as an op of the user does: the copy is of the old content, and goes."""
        if life.storage is None:
            return
        if life.leaving is not None:
            life.leaving.wait()
            life.leaving = None
        if life.slot is not None:
            self.tier.release(life.slot)
            self.tier.release(life.slot)
            life.slot = None
        life.number = next(self.numbers)
        self.device.fill(life.storage, life.number)

    def _rewrite(self, life: Life) -> None:
        """Write new content into the same slot."""
        if life.storage is None or life.slot is None:
            return
        if life.leaving is not None:
            life.leaving.wait()
        life.number = next(self.numbers)
        self.device.fill(life.storage, life.number)
        life.leaving = self.tier.write(life.slot, life.storage)

    def _release(self, life: Life) -> None:
        self._forget(life)

    def _forget(self, life: Life) -> None:
        """Drop everything, whatever is in flight."""
        self.lives.remove(life)
        if life.slot is not None:
            self.tier.release(life.slot)

    # -- room

    def _allocate(self, size_bytes: int, *, but: Life | None = None) -> torch.UntypedStorage | None:
        """Allocate, making room as the runtime does: wait for what leaves, cancel fetches, send others away."""
        storage = self.device.allocate(size_bytes)
        for life in [*self.lives, *self.lives]:
            if storage is not None:
                return storage
            if life is but:
                continue
            if life.leaving is not None:
                self._arrive(life)
            elif life.fetch is not None:
                transfer, _ = life.fetch
                transfer.wait()
                life.fetch = None
                del transfer, _
            elif self._evict(life):
                self._arrive(life)
            for transfer, target, number in life.beside:
                transfer.wait()
                self.device.check(target, number)
            transfer = target = None
            life.beside.clear()
            storage = self.device.allocate(size_bytes)
        if storage is None:
            self.tier.drain()
            storage = self.device.allocate(size_bytes)
        return storage

    def _check_tier(self) -> None:
        slots_bytes = sum(life.size_bytes for life in self.lives if life.slot is not None)
        capacity_bytes = self.tier.capacity_bytes
        assert slots_bytes <= self.tier.used_bytes
        assert capacity_bytes is None or self.tier.peak_used_bytes <= capacity_bytes
