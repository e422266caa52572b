"""Paths that use a tier without the runtime: random calls in any order, and short programs where one wait matters."""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from tests.racecheck.paths import DEVICE, DRAWN, Bench, Play, watched_disk
from tests.runtime.tiers.devices import AcceleratorDevice
from tests.runtime.tiers.players import Player
from torchdelta.runtime.tiers import bounced, open_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.tiers.engine import Stream

DEVICE_BYTES: Final = 24 << 10
LARGEST_BYTES: Final = 6_000
NUM_CALLS: Final = 25
ROOM_BYTES: Final = 4096  # a page
LATEST_S: Final = 2e-3  # a thread of the disk tier starts a part so much later at most
# Tier, and host and disk budget in bytes: a slot is often handed on, and some are in two pieces.
TIERS: Final = {
    "tier-pinned": ("memory", 1 << 14, None),
    "tier-disk": ("disk", 1 << 12, 1 << 16),
    "tier-stacked": ("disk", 1 << 14, 1 << 16),
}

_warm: set[str] = set()


def play_calls(bench: Bench, name: str, seed: int) -> Play:
    """Play random calls on a tier."""
    if name not in _warm:
        # The first run of some ops imports modules, and leaves circles behind in which storages stay alive.
        _warm.add(name)
        play_calls(bench, name, seed)
        gc.collect()
    kind, host_bytes, disk_bytes = TIERS[name]
    device = torch.device(DEVICE, 0)
    with (
        bench.schedule(seed) as (found, counts),
        watched_disk(bench.extension),
        late_threads(seed),
        tempfile.TemporaryDirectory() as directory,
    ):
        memory = AcceleratorDevice(device, seed, DEVICE_BYTES)
        tier: Any = open_tier(
            kind, device=device, swap_dir=directory, host_budget_bytes=host_bytes, disk_budget_bytes=disk_bytes
        )
        bench.extension.set_mode(DRAWN, seed)
        gc.disable()
        try:
            with noted(found):
                Player(tier, memory, seed).play(NUM_CALLS, LARGEST_BYTES)
        finally:
            gc.enable()
            with noted(found):
                tier.close()
    return Play(found=tuple(found), num_kernels=counts[0], has_fitted=True)


@contextlib.contextmanager
def noted(found: list[str]) -> Iterator[None]:
    """Add an exception to what was found: a mutant may break any call, closing the tier included."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a mutant breaks
        found.append(f"{type(error).__name__}: {str(error)[:200]}")


@contextlib.contextmanager
def late_threads(seed: int) -> Iterator[None]:
    """Let the threads of the disk tier start some parts late: the operating system alone would rarely do so."""
    medium: Any = vars(bounced)["_BouncedMedium"]
    plain = medium.write_part, medium.read_part
    rng, lock = random.Random(seed), threading.Lock()

    def late(move: Callable[..., None]) -> Callable[..., None]:
        def moved(self: Any, worker: int, part: Any) -> None:
            with lock:
                delay_s = rng.choice((0.0, 0.0, rng.random() * LATEST_S))
            time.sleep(delay_s)
            move(self, worker, part)

        return moved

    with (
        mock.patch.object(medium, "write_part", late(plain[0])),
        mock.patch.object(medium, "read_part", late(plain[1])),
    ):
        yield


def play_short(bench: Bench, name: str, seed: int) -> Play:
    """Play a few calls in which one wait matters: one of SHORT, on a pinned tier of its own."""
    host_bytes, program = SHORT[name]
    device = torch.device(DEVICE, 0)
    with bench.schedule(seed) as (found, counts):
        tier: Any = open_tier("memory", device=device, host_budget_bytes=host_bytes)
        bench.extension.set_mode(DRAWN, seed)
        with noted(found):
            found.extend(program(tier, device))
        with noted(found):
            tier.close()
    return Play(found=tuple(found), num_kernels=counts[0], has_fitted=True)


def interrupted(tier: Any, device: torch.device) -> list[str]:
    """Interrupt a copy out between its two pieces: its memory may be freed once the error has been raised."""
    slots = [tier.reserve(1 << 20) for _ in range(8)]
    for slot in slots[::2]:
        tier.release(slot)
    slot = tier.reserve(2 << 20)
    engine, plain_copy = tier.engine, tier.engine.copy
    num_copies = 0

    def copy(stream: Stream, **where: int) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 2:
            raise KeyboardInterrupt
        plain_copy(stream, **where)

    storage = _filled(device, 2 << 20)
    with mock.patch.object(engine, "copy", copy), contextlib.suppress(KeyboardInterrupt):
        tier.write(slot, storage)
    del storage
    _filled(device, 2 << 20)  # the memory's next user
    return [] if num_copies == 2 else [f"{num_copies} pieces in place of 2"]


def reused(tier: Any, device: torch.device) -> list[str]:
    """Release a slot while it is being read: its room is written at once."""
    slot = tier.reserve(ROOM_BYTES)
    tier.write(slot, _filled(device, ROOM_BYTES)).wait()
    target = torch.UntypedStorage(ROOM_BYTES, device=device)
    arriving = tier.read(slot, target)
    tier.release(slot)
    tier.write(tier.reserve(ROOM_BYTES), _filled(device, ROOM_BYTES)).wait()
    arriving.wait()
    return []


def dropped(tier: Any, device: torch.device) -> list[str]:
    """Drop a read without waiting for it: the tier lets go of the target once the copy has ended."""
    slot = tier.reserve(ROOM_BYTES)
    tier.write(slot, _filled(device, ROOM_BYTES)).wait()
    torch.accelerator.synchronize(device.index)
    before_bytes = torch.accelerator.memory.memory_allocated(device.index)
    tier.read(slot, torch.UntypedStorage(ROOM_BYTES, device=device))
    torch.accelerator.synchronize(device.index)
    tier.take_stall_s()  # looks at what has ended
    held_bytes = torch.accelerator.memory.memory_allocated(device.index) - before_bytes
    return [f"{held_bytes} bytes are held after their copy has ended"] if held_bytes else []


def closed(tier: Any, device: torch.device) -> list[str]:
    """Leave copies in both directions under way: closing the tier comes next."""
    slots = [tier.reserve(ROOM_BYTES // 2) for _ in range(2)]
    tier.write(slots[0], _filled(device, ROOM_BYTES // 2)).wait()
    tier.read(slots[0], torch.UntypedStorage(ROOM_BYTES // 2, device=device)).wait()
    tier.write(slots[1], _filled(device, ROOM_BYTES // 2)).wait()
    return []


def _filled(device: torch.device, size_bytes: int) -> torch.UntypedStorage:
    return torch.full((size_bytes,), 7, dtype=torch.uint8, device=device).untyped_storage()


# Host budget in bytes, and what is done.
SHORT: Final[dict[str, tuple[int, Callable[[Any, torch.device], list[str]]]]] = {
    "tier-interrupted": (1 << 23, interrupted),
    "tier-reused": (ROOM_BYTES, reused),
    "tier-dropped": (ROOM_BYTES, dropped),
    "tier-closed": (ROOM_BYTES, closed),
}
