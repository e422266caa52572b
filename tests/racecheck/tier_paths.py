"""Paths that use a tier without the runtime: random calls in any order, and a copy that is interrupted."""

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
            Player(tier, memory, seed).play(NUM_CALLS, LARGEST_BYTES)
        except Exception as error:  # noqa: BLE001 - whatever a mutant breaks
            found.append(f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            gc.enable()
            tier.close()
    return Play(found=tuple(found), num_kernels=counts[0], has_fitted=True)


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


def play_interrupted(bench: Bench, seed: int) -> Play:
    """Interrupt a copy out between its two pieces: its memory may be freed once the error has been raised."""
    device = torch.device(DEVICE, 0)
    with bench.schedule(seed) as (found, counts):
        tier: Any = open_tier("memory", device=device, host_budget_bytes=1 << 23)
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

        bench.extension.set_mode(DRAWN, seed)
        storage = torch.full((2 << 20,), seed % 100, dtype=torch.uint8, device=device).untyped_storage()
        with mock.patch.object(engine, "copy", copy), contextlib.suppress(KeyboardInterrupt):
            tier.write(slot, storage)
        if num_copies != 2:
            found.append(f"{num_copies} pieces in place of 2")
        del storage
        tier.close()
    return Play(found=tuple(found), num_kernels=counts[0], has_fitted=True)
