"""Reads what this process can use of its machine: memory, and processor time.

Memory is RAM, or the limit set by a container or a job scheduler.

"80%" of a CPU is 80 % of the lesser of the two; inside a container the RAM alone would be far too much. What is free is
the lesser of what the kernel calls available and of what each group has left under its limit. The page cache of files
that were not read lately counts as free in both.
Both are read from /proc and /sys on Linux; elsewhere the limit is unknown and the RAM comes from sysconf.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "HostMemory",
    "declare_processes_here",
    "num_processes_here",
    "processor_name",
    "read_host_memory",
    "read_stolen_s",
    "share_bytes",
]

# cgroup v1 writes "no limit" as the largest multiple of a page below 2**63.
_UNLIMITED_FROM_BYTES = 2**60
_NUM_STOLEN_COLUMNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of the host that this process may use.

    Attributes:
        ram_bytes: Physical memory of the machine.
        available_bytes: Memory available now without swapping, as the kernel estimates it; None if it does not.
        cgroup_limit_bytes: The lowest limit of the control groups that this process is in; None without a limit.
        cgroup_left_bytes: What is left under the limits of these groups, in the one with the least; None without a
            limit, or where the usage is not known.
    """

    ram_bytes: int
    available_bytes: int | None
    cgroup_limit_bytes: int | None
    cgroup_left_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """The lesser of RAM and limit; percentages are relative to it."""
        if self.cgroup_limit_bytes is None:
            return self.ram_bytes
        return min(self.ram_bytes, self.cgroup_limit_bytes)

    @property
    def free_bytes(self) -> int:
        """What can be allocated now: the lesser of what is available and of what is left under the limit."""
        known = [size for size in (self.available_bytes, self.cgroup_left_bytes) if size is not None]
        return min([*known, self.usable_bytes])  # of a limit whose usage is not known, no more than the limit


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the host.

    Args:
        root: The directory that contains /proc and /sys; tests pass another one.
    """
    meminfo = _read_meminfo(root / "proc/meminfo")
    limits_bytes, left_bytes = _cgroup_bytes(root)
    ram_bytes = meminfo.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(
        ram_bytes=ram_bytes,
        available_bytes=meminfo.get("MemAvailable"),
        cgroup_limit_bytes=min(limits_bytes, default=None),
        cgroup_left_bytes=min(left_bytes, default=None),
    )


def processor_name() -> str:
    """Return the name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_declared_processes: list[int] = []  # at most one number


def num_processes_here() -> int:
    """Return how many training processes a launcher started on this machine; 1 without a launcher.

    torchrun (and with it `accelerate launch`) sets LOCAL_WORLD_SIZE.
    """
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    if number.isdecimal():
        return max(1, int(number))
    return _declared_processes[0] if _declared_processes else 1


def declare_processes_here(number: int | None) -> None:
    """Set how many training processes this machine has if their launcher sets no LOCAL_WORLD_SIZE; None: unknown."""
    _declared_processes[:] = [] if number is None else [max(1, number)]


def share_bytes(size_bytes: int | None) -> int | None:
    """Return this process's share of bytes that all training processes of this machine share; None is no limit."""
    return None if size_bytes is None else max(1, size_bytes // num_processes_here())


def read_stolen_s(root: Path = Path("/")) -> float | None:
    """Return the processor time that interrupts took and that a hypervisor gave to others ("steal"), in seconds.

    It counts from the start of the machine, over the processors that this process may use, in steps of 10 ms.

    Args:
        root: The directory that contains /proc; tests pass another one.

    Returns:
        The seconds; None where the kernel does not tell (in some sandboxes all counts are 0).
    """
    processors = {f"cpu{index}" for index in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    counts = [
        # The columns after the name: user, nice, system, idle, iowait, irq, softirq, steal, ...
        [int(word) for word in words[6:9]]
        for line in _read_text(root / "proc/stat").splitlines()
        if (words := line.split()) and words[0] in processors and all(word.isdecimal() for word in words[6:9])
    ]
    if not counts or any(len(count) < _NUM_STOLEN_COLUMNS for count in counts):
        return None
    return sum(map(sum, counts)) / os.sysconf("SC_CLK_TCK") or None


def _read_meminfo(path: Path) -> dict[str, int]:
    sizes_bytes: dict[str, int] = {}
    for line in _read_text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes_bytes[name] = int(words[0]) * 1024
    return sizes_bytes


def _cgroup_bytes(root: Path) -> tuple[list[int], list[int]]:
    """Return the limits of all groups that hold for this process, and what is left under each whose usage is known."""
    limits_bytes: list[int] = []
    left_bytes: list[int] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Limits of parent groups apply too. Inside a container the named group may not be visible, but its root is.
        relative = Path(group.lstrip("/"))
        for directory in (relative, *relative.parents):
            limit_bytes = _read_number(mount / directory / names[0])
            if limit_bytes is None or limit_bytes >= _UNLIMITED_FROM_BYTES:
                continue
            limits_bytes.append(limit_bytes)
            usage_bytes = _read_number(mount / directory / names[1])
            if usage_bytes is not None:
                cache_bytes = _read_statistic(mount / directory / "memory.stat", names[2])
                left_bytes.append(max(0, limit_bytes - max(0, usage_bytes - cache_bytes)))
    return limits_bytes, left_bytes


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _read_statistic(path: Path, name: str) -> int:
    for line in _read_text(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
