"""Plays random schedules on a tier of a device, as the runtime would use it, and holds the tier to its word."""

import itertools
import random
from typing import Protocol

import pytest
import torch

from torchdelta.errors import TierFullError, TierIOError
from torchdelta.runtime.tiers.base import Slot, Tier, Transfer
from torchdelta.runtime.tiers.stacked import StackedTier

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


ODD_SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097)


class Device(Protocol):
    """What a schedule needs of a device; simulated, or real (see `devices.py`)."""

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


def _concerns(action: str, life: Life) -> bool:
    """Return whether an action does anything to a buffer."""
    is_there = life.storage is not None
    match action:
        case "evict":
            return is_there and life.leaving is None
        case "arrive":
            return life.leaving is not None
        case "fetch":
            return not is_there and life.fetch is None
        case "drop fetch":
            return life.fetch is not None
        case "read beside":
            return life.slot is not None and len(life.beside) < 2
        case "overwrite":
            return is_there
        case "rewrite":
            return is_there and life.slot is not None
        case _:
            return True


def _parts(tier: Tier) -> tuple[Tier, ...]:
    return (tier.first, tier.second) if isinstance(tier, StackedTier) else (tier,)


def _has_room(tier: Tier, size_bytes: int) -> bool:
    """Return whether a tier surely has room for a slot, whatever its block."""
    return tier.capacity_bytes is None or tier.used_bytes + size_bytes + 4096 <= tier.capacity_bytes


class Player:
    """Carries a schedule out: make, evict, bring back, use, overwrite, release, in any order.

    Args:
        tier: What is tried.
        device: Where the storages are.
        seed: Of what is done.
        can_fail: Whether transfers may fail. A buffer that could not leave stays, and one that could not come back is
            asked for again; nothing is ever lost.
        is_alone: Whether nobody else uses the tier and the device.
    """

    def __init__(self, tier: Tier, device: Device, seed: int, *, can_fail: bool = False, is_alone: bool = True) -> None:
        self.tier = tier
        self.device = device
        self.can_fail = can_fail
        self.is_alone = is_alone
        self.num_failures = 0
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.lives: list[Life] = []
        self.num_stuck = 0  # allocations that found no room although everything possible had left

    def play(self, num_steps: int, largest_bytes: int) -> None:
        """Do so many things at random, then bring everything back and look at it, then give everything up."""
        for _ in range(num_steps):
            size_bytes = self.random.choice((self.random.randrange(largest_bytes), self.random.choice(ODD_SIZES)))
            self.act(self.random.choice(ACTIONS), size_bytes)
            assert self.device.used_bytes <= self.device.budget_bytes
            self._check_tier()
        while self.lives:
            self._use(self.lives[-1])
            self._forget(self.lives[-1])
        self.tier.drain()
        if self.is_alone:
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
        else:
            concerned = [life for life in self.lives if _concerns(action, life)]
            if concerned:
                getattr(self, "_" + action.replace(" ", "_"))(self.random.choice(concerned))

    # -- one buffer

    def _evict(self, life: Life) -> bool:
        if life.storage is None or life.leaving is not None:
            return False
        if life.slot is None:
            had_room = self.is_alone and any(_has_room(tier, life.size_bytes) for tier in _parts(self.tier))
            try:
                life.slot = self.tier.reserve(life.size_bytes)
            except TierFullError:
                assert not had_room
                return False
            life.leaving = self.tier.write(life.slot, life.storage)
        else:
            life.storage = None  # its copy is there
        return True

    def _arrive(self, life: Life) -> None:
        if life.leaving is None or not self._has_left(life):
            return
        before_bytes = self.device.used_bytes
        life.storage = None
        if self.is_alone:
            assert self.device.used_bytes < before_bytes or life.size_bytes == 0, "what has arrived is let go of"

    def _has_left(self, life: Life) -> bool:
        """Wait for a copy on its way out; one that failed is no copy, and the source is untouched."""
        assert life.leaving is not None
        leaving, life.leaving = life.leaving, None
        if self._wait(leaving):
            assert leaving.wait() == 0.0
            return True
        assert life.slot is not None
        with pytest.raises(TierIOError):
            leaving.wait()
        self.tier.release(life.slot)
        life.slot = None
        return False

    def _wait(self, transfer: Transfer) -> bool:
        try:
            transfer.wait()
        except TierIOError:
            assert self.can_fail
            self.num_failures += 1
            return False
        return True

    def _read(self, life: Life, storage: torch.UntypedStorage) -> bool:
        """Read until it succeeds; False where the write before had failed, so that nothing is there to be read."""
        assert life.slot is not None
        while not self._wait(self.tier.read(life.slot, storage)):
            if life.leaving is not None and not self._has_left(life):
                return False
        return True

    def _fetch(self, life: Life) -> None:
        if life.storage is None and life.fetch is None and life.slot is not None:
            storage = self._allocate(life.size_bytes, but=life)
            if storage is not None and life.storage is None and life.fetch is None:
                life.fetch = (self.tier.read(life.slot, storage), storage)

    def _drop_fetch(self, life: Life) -> None:
        life.fetch = None  # without waiting for it

    def _use(self, life: Life) -> None:
        if life.fetch is not None and life.storage is None:
            transfer, storage = life.fetch
            life.fetch = None
            life.storage = storage if self._wait(transfer) else None
            transfer = storage = None
        if life.storage is None:
            assert life.slot is not None
            storage = self._allocate(life.size_bytes, but=life)
            if storage is None:
                self.num_stuck += 1
                return
            assert self._read(life, storage)
            life.storage = storage
        self.device.check(life.storage, life.number)
        self._look_beside(life)

    def _look_beside(self, life: Life) -> None:
        for transfer, storage, number in life.beside:
            if self._wait(transfer):
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
            self._has_left(life)
        if life.slot is not None:
            self.tier.release(life.slot)
            self.tier.release(life.slot)
            life.slot = None
        life.number = next(self.numbers)
        self.device.fill(life.storage, life.number)

    def _rewrite(self, life: Life) -> None:
        """Write new content into the same slot."""
        if life.leaving is not None:
            self._has_left(life)
        if life.storage is None or life.slot is None:
            return
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
                self._wait(life.fetch[0])
                life.fetch = None
            elif self._evict(life):
                self._arrive(life)
            self._look_beside(life)
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
