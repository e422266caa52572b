"""What a process holds: storages, objects by type, open files, threads, bytes of the C library's heap, resident bytes.

Storages are asked of the garbage collector: a measure independent of the runtime's own counts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def live_storages() -> dict[int, int]:
    """Return identity -> bytes of every storage that a Python tensor or storage holds."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # type(), not isinstance: lazy proxies (torch, transformers) run code when they are asked for their class.
        kind = type(candidate)
        if kind is torch.UntypedStorage:
            storage = candidate
        elif issubclass(kind, torch.Tensor):
            if candidate.layout is not torch.strided or candidate.device.type != "cpu":
                continue
            storage = candidate.untyped_storage()
            if candidate.grad_fn is None and candidate.is_leaf and candidate.grad is not None:
                gradient = candidate.grad.untyped_storage()
                storages[gradient._cdata] = gradient.nbytes()
        else:
            continue
        storages[storage._cdata] = storage.nbytes()
    return storages


def count_held() -> dict[str, Any]:
    """Count live tensor bytes, objects by type, open files, threads, heap bytes and resident bytes."""
    # First of all: looking at a storage from Python makes an object that stays with it.
    live_bytes = sum(live_storages().values())
    gc.collect()
    names = [f"{type(held).__module__}.{type(held).__qualname__}" for held in gc.get_objects()]
    types = Counter(names)
    return {
        "live_bytes": live_bytes,
        "num_objects": len(names),
        "types": dict(types),
        "num_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
        "num_threads": threading.active_count(),
        "heap_bytes": heap_bytes(),
        "rss_bytes": resident_bytes(),
    }


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later: see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes of the blocks that are allocated by `malloc`; 0 where the C library does not tell.

    Resident memory also contains free blocks between them. How many there are differs from run to run by several
    percent.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _MallInfo2
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe_types(first: dict[str, int], last: dict[str, int]) -> str:
    """Name the types whose number changed, the largest change first."""
    changes = {name: last.get(name, 0) - first.get(name, 0) for name in {*first, *last}}
    changed = sorted((name for name in changes if changes[name]), key=lambda name: -abs(changes[name]))
    return ", ".join(f"{name} {changes[name]:+d}" for name in changed[:8])
