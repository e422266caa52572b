"""The device whose memory is held: how much of it there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def device_memory_bytes() -> int:
    """Return the bytes of the device: the GPU's memory, or on CPU the lesser of RAM and the limits of the cgroups that this process is in."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits.extend(_cgroup_limits())
    return min(limits)


def _cgroup_limits() -> list[int]:
    limits: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name, top = Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            top = Path("/sys/fs/cgroup/memory")
            folder, name = top / path.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        while True:
            try:
                text = (folder / name).read_text(encoding="ascii").strip()
            except OSError:
                text = "max"
            if text.isdigit():
                limits.append(int(text))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return limits
