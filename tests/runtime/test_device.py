"""How much memory there is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from torchdelta.runtime import device
from torchdelta.runtime.device import device_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_memory_of_this_machine() -> None:
    """On CPU never more than the RAM, and never nothing."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < device_memory_bytes() <= ram_bytes


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"/sys/fs/cgroup/a/memory.max": "4096000", "/sys/fs/cgroup/a/b/memory.max": "max"}, 4_096_000),
        (
            "0::/a/b\n",
            {"/sys/fs/cgroup/a/memory.max": "4096000", "/sys/fs/cgroup/a/b/memory.max": "1000000"},
            1_000_000,
        ),
        ("0::/\n", {"/sys/fs/cgroup/memory.max": "5000000"}, 5_000_000),
        ("4:memory:/x\n", {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3000000"}, 3_000_000),
        ("4:cpu,memory:/x\n0::/\n", {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ("1:cpu:/x\n", {"/sys/fs/cgroup/memory.max": "1"}, None),
        (None, {}, None),
    ],
)
def test_limits_of_the_control_groups(
    groups: str | None, files: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least limit on the way up counts, in both versions of control groups."""

    def read_text(path: Path, encoding: str | None = None) -> str:
        del encoding
        text = groups if str(path) == "/proc/self/cgroup" else files.get(str(path))
        if text is None:
            raise FileNotFoundError(str(path))
        return text

    monkeypatch.setattr(device.Path, "read_text", read_text)
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device_memory_bytes() == (expected if expected is not None else ram_bytes)
