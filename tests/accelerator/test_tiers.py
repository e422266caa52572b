"""The tiers of an accelerator: random schedules on the device, training with late copies, threads on one stream."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.programs import UNLIMITED, same_bits
from tests.runtime.test_stream_training import MODELS, plain_run, run
from tests.runtime.tiers.devices import AcceleratorDevice
from tests.runtime.tiers.players import Player
from tests.runtime.tiers.simulated import SimulatedEngine
from tests.same_bits.judge import DEVICE, Scope, assert_same_bits, state_of
from torchdelta import BudgetError
from torchdelta.runtime.tiers import ENGINES, open_tier
from torchdelta.runtime.tiers.accelerator import AcceleratorEngine
from torchdelta.runtime.tiers.engine import Stream
from torchdelta.runtime.tiers.pinned import PinnedTier

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize(("name", "host_bytes"), [("memory", 1 << 16), ("disk", 1 << 16), ("disk", 1 << 12)])
@given(num_steps=st.integers(10, 100), largest_bytes=st.sampled_from([2_000, 40_000]), seed=st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_schedules_on_the_device(
    device: torch.device, tmp_path: Path, name: str, host_bytes: int, num_steps: int, largest_bytes: int, seed: int
) -> None:
    """The schedules of the simulated device are right through torch's own streams, events and copies."""
    memory = AcceleratorDevice(device, seed, 96 << 10)
    tier = open_tier(name, device=device, swap_dir=tmp_path, host_budget_bytes=host_bytes, disk_budget_bytes=160 << 10)
    try:
        Player(tier, memory, seed).play(num_steps, largest_bytes)
    finally:
        tier.close()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_training_under_pressure(tmp_path: Path, name: str, tier: str) -> None:
    """Real copies in real streams, at several budgets of the device and the host: the same bits, or a clear error."""
    expected, peak_bytes = plain_run(name, DEVICE)
    options = {"tier": tier, "swap_dir": tmp_path}
    observed, _ = run(name, UNLIMITED, DEVICE, decisions="swap", **options)
    assert same_bits(observed, expected)
    for share in (0.9, 0.7, 0.5):
        for host_bytes in (1 << 22, 1 << 16):
            with contextlib.suppress(BudgetError):
                observed, _ = run(
                    name, int(peak_bytes * share), DEVICE, policy="swap-only", host_budget=host_bytes, **options
                )
                assert same_bits(observed, expected)


class LateCopies:
    """Opens engines whose copies happen later, at random, in the stand-in's memory, which the host can address."""

    def __init__(self) -> None:
        self.engines: list[SimulatedEngine] = []

    def open(self, device: torch.device) -> SimulatedEngine:
        """Make one."""
        engine = SimulatedEngine(len(self.engines), is_eager=True)
        engine.device = device
        self.engines.append(engine)
        return engine


@pytest.mark.skipif(DEVICE != "standin", reason="the host cannot address the device's memory")
@pytest.mark.usefixtures("device")
def test_training_with_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked on the engine's threads, with copies that are late: the same bits, and nothing freed under a copy.

    The stand-in writes over what is freed, so a copy from or to freed memory would show in the bits.
    """
    late = LateCopies()
    monkeypatch.setitem(ENGINES, DEVICE, late.open)
    threads: set[tuple[int, bool]] = set()
    start = PinnedTier.start_copy

    def noted_start(self: PinnedTier, slot: Any, storage: torch.UntypedStorage, *, is_read: bool) -> Any:
        threads.add((threading.get_ident(), is_read))
        return start(self, slot, storage, is_read=is_read)

    monkeypatch.setattr(PinnedTier, "start_copy", noted_start)

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with scope():
            for _ in range(3):
                model(torch.randn(32, 64)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)

    for _ in range(4):
        assert_same_bits(step)
    assert sum(engine.num_copies for engine in late.engines) > 100
    assert [engine.complaints for engine in late.engines if engine.complaints] == []
    assert all(engine.pinned == {} for engine in late.engines)
    assert (threading.get_ident(), False) in threads
    assert any(is_read and thread != threading.get_ident() for thread, is_read in threads)


def test_a_side_stream_entered_by_two_threads(device: torch.device) -> None:
    """Each thread finds its own stream again: torch's `with stream` would give one the other's."""
    engine = ENGINES[DEVICE](device)
    assert isinstance(engine, AcceleratorEngine)
    mine, inside, leave = torch.Stream(device), threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        with engine.on_side(Stream.OUT):
            inside.set()
            leave.wait()
        found.append(torch.accelerator.current_stream(device.index).stream_id)

    before = torch.accelerator.current_stream(device.index)
    torch.accelerator.set_stream(mine)
    thread = threading.Thread(target=other)
    with engine.on_side(Stream.OUT):
        thread.start()
        inside.wait()
    found.append(torch.accelerator.current_stream(device.index).stream_id)
    torch.accelerator.set_stream(before)
    leave.set()
    thread.join()
    assert found == [mine.stream_id, before.stream_id]


def test_all_compute_streams_are_waited_for(device: torch.device) -> None:
    """A mark of the compute stream stands in every stream that has called, its own first."""
    engine = ENGINES[DEVICE](device)
    assert len(engine.mark(Stream.COMPUTE)) == 1
    before, side = torch.accelerator.current_stream(device.index), torch.Stream(device)
    torch.accelerator.set_stream(side)
    assert len(engine.mark(Stream.COMPUTE, is_timed=True)) == 2
    torch.accelerator.set_stream(before)
    mark = engine.mark(Stream.COMPUTE)
    assert len(mark) == 2
    engine.follow(Stream.COMPUTE, mark)
    engine.finish(mark)
    assert engine.is_reached(mark)
    assert len(engine.mark(Stream.OUT)) == 1
