"""Reads how much memory this process can use: RAM, and the limit set by a container or a job scheduler.

"80%" of a CPU is 80 % of the lesser of the two; inside a container the RAM alone would be far too much.
Both are read from /proc and /sys on Linux; elsewhere the limit is unknown and the RAM comes from sysconf.
"""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "read_host_memory"]

# cgroup v1 writes "no limit" as the largest multiple of a page below 2**63.
_UNLIMITED_FROM_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of the host that this process may use.

    Attributes:
        ram_bytes: Physical memory of the machine.
        available_bytes: Memory available now without swapping, as the kernel estimates it; None if it does not.
        cgroup_limit_bytes: The lowest limit of the control groups that this process is in; None without a limit.
    """

    ram_bytes: int
    available_bytes: int | None
    cgroup_limit_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """The lesser of RAM and limit; percentages are relative to it."""
        if self.cgroup_limit_bytes is None:
            return self.ram_bytes
        return min(self.ram_bytes, self.cgroup_limit_bytes)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the host.

    Args:
        root: The directory that contains /proc and /sys; tests pass another one.
    """
    meminfo = _read_meminfo(root / "proc/meminfo")
    ram_bytes = meminfo.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(
        ram_bytes=ram_bytes,
        available_bytes=meminfo.get("MemAvailable"),
        cgroup_limit_bytes=_lowest_cgroup_limit_bytes(root),
    )


def _read_meminfo(path: Path) -> dict[str, int]:
    sizes_bytes: dict[str, int] = {}
    for line in _read_text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes_bytes[name] = int(words[0]) * 1024
    return sizes_bytes


def _lowest_cgroup_limit_bytes(root: Path) -> int | None:
    limits_bytes: list[int] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, file_name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Limits of parent groups apply too. Inside a container the named group may not be visible, but its root is.
        relative = Path(group.lstrip("/"))
        for directory in (relative, *relative.parents):
            text = _read_text(mount / directory / file_name).strip()
            if text.isdecimal() and int(text) < _UNLIMITED_FROM_BYTES:
                limits_bytes.append(int(text))
    return min(limits_bytes, default=None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
