"""Tiers by name."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch

from tests.runtime.tiers.simulated import SimulatedEngine
from torchdelta.config import TIERS
from torchdelta.errors import TierError, TierFullError
from torchdelta.host import HostMemory
from torchdelta.runtime.tiers import ENGINES, open_tier, scratch, tier_names
from torchdelta.runtime.tiers.pinned import PinnedTier
from torchdelta.runtime.tiers.stacked import StackedTier


def test_every_configurable_tier_can_be_opened(tmp_path: Path) -> None:
    """The names that `Config` allows are the names that open."""
    assert set(tier_names()) == set(TIERS)
    for name in tier_names():
        tier = open_tier(name, swap_dir=tmp_path, host_budget_bytes=1 << 20, disk_budget_bytes=1 << 21)
        assert tier.name == name
        assert tier.capacity_bytes == {"disk": 1 << 21, "memory": 1 << 20}[name]
        assert tier.staging_bytes <= 1 << 20
        tier.close()


@pytest.mark.parametrize("name", ["disk", "memory"])
@pytest.mark.parametrize("host_budget_bytes", [4096, 9000, 1 << 20])
def test_tiers_of_a_device_share_the_host_budget(
    name: str, host_budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with streams both names mean pinned memory, "disk" with a disk behind it; staging counts."""
    engines = []

    def make_engine(_: torch.device) -> SimulatedEngine:
        engines.append(SimulatedEngine(1))
        return engines[-1]

    monkeypatch.setitem(ENGINES, "cpu", make_engine)
    device = torch.device("cpu")
    tier = open_tier(
        name, device=device, swap_dir=tmp_path, host_budget_bytes=host_budget_bytes, disk_budget_bytes=1 << 16
    )
    assert tier.name == name
    assert isinstance(tier, PinnedTier if name == "memory" else StackedTier)
    num_slots = 0
    with contextlib.suppress(TierFullError):
        while True:
            tier.reserve(4096)
            num_slots += 1
    pages = host_budget_bytes // 4096 - tier.staging_bytes // 4096
    assert num_slots == pages + (16 if name == "disk" else 0)
    assert (host_budget_bytes - 2 * 4096 if name == "memory" else 1) <= engines[0].peak_pinned_bytes
    assert engines[0].peak_pinned_bytes <= host_budget_bytes
    tier.close()
    assert engines[0].pinned == {}


def test_pinned_memory_without_a_budget_leaves_half_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pinned cannot be paged out: all of it would stop the machine. Processes of one machine share."""
    monkeypatch.setitem(ENGINES, "cpu", lambda _: SimulatedEngine(1))
    monkeypatch.setattr(
        "torchdelta.runtime.tiers.read_host_memory",
        lambda: HostMemory(ram_bytes=64 << 30, available_bytes=40 << 30, cgroup_limit_bytes=48 << 30),
    )
    for num_processes, capacity_bytes in (("", 20 << 30), ("4", 5 << 30)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_processes)
        tier = open_tier("memory", device=torch.device("cpu"))
        assert tier.capacity_bytes == capacity_bytes
        tier.close()


def test_what_others_use_of_a_containers_limit_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have much that is free, and the container little that is left: the lesser of both counts."""
    monkeypatch.setitem(ENGINES, "cpu", lambda _: SimulatedEngine(1))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    memory = HostMemory(
        ram_bytes=64 << 30, available_bytes=40 << 30, cgroup_limit_bytes=48 << 30, cgroup_left_bytes=4 << 30
    )
    monkeypatch.setattr("torchdelta.runtime.tiers.read_host_memory", lambda: memory)
    tier = open_tier("memory", device=torch.device("cpu"))
    assert tier.capacity_bytes == 2 << 30
    tier.close()


def test_an_unknown_tier_is_refused_with_the_known_names() -> None:
    """One line."""
    with pytest.raises(TierError, match=r"there is no tier 'tape'; take one of 'disk', 'memory'"):
        open_tier("tape")


def test_a_disk_is_opened_without_memory_for_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier may be opened because memory has run out: then its first estimates are not measured."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(scratch.mmap, "mmap", refuse)
        scratch_file = scratch.open_scratch_file(tmp_path, capacity_bytes=1 << 20)
    try:
        assert scratch_file.write_bytes_per_s > 0
        assert scratch_file.read_bytes_per_s > 0
        assert os.fstat(scratch_file.descriptor).st_size == 0
    finally:
        os.close(scratch_file.descriptor)
