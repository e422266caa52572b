"""The caching CPU allocator: the pages of large freed blocks are used again, and no more is held than was in use.

Without it a budget bounds the tensors of a process, not its resident memory: the C library's heap keeps pages after the
tensors on them were freed. The C++ side is caching.cpp, where [Note: pages are moved, not mapped anew] says how.

It is installed below the counting allocator (counting.py), once per process, at the first budget, and never removed. It
is on while a budget runs on CPU; otherwise it forwards. TORCHDELTA_NATIVE=0 disables it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, NativeStatus, is_switched_off, load, status_before_use, status_in_use
from torchdelta.native.counting import installed_module

__all__ = [
    "MODULE",
    "CachingAllocator",
    "CachingFigures",
    "allocator_below",
    "caching_allocator",
    "caching_figures",
    "caching_status",
    "new_storage",
    "release_kept",
]

# What a broken build would get wrong: blocks that share pages, content that is lost while pages are moved, blocks from
# before and after, frees on another thread, resizing, a fork, profiler events, and pages that nobody uses.
_SELF_TEST: Final = """
import os, threading
from torchdelta.native import counting
assert not isinstance(counting.new_counter(), Exception)
below = counting.installed_module()
torch.set_num_threads(1)  # OpenMP's threads are missing in a child of fork()
old = torch.ones(1 << 20)
below.set_previous(module.install_before(below.previous()))
MIB = 1 << 20
def block(num_mib, value):
    return torch.full((num_mib * MIB,), value, dtype=torch.uint8)
outside = block(2, 9)
assert module.figures()["live_bytes"] == 0
module.start()
held = [block(3, value) for value in range(8)]
assert module.figures()["live_bytes"] == module.figures()["peak_bytes"] == 24 * MIB
del held[::2]
whole = block(12, 100)
assert module.figures()["moved_bytes"] == 12 * MIB and module.figures()["peak_bytes"] == 24 * MIB, module.figures()
assert whole.eq(100).all() and all(held[i].eq(2 * i + 1).all() for i in range(4))
small = [block(1, 30 + i) for i in range(4)]
del whole
more = block(5, 50)
assert more.eq(50).all() and all(small[i].eq(30 + i).all() for i in range(4))
holder = [small]
del small
other = threading.Thread(target=holder.clear)
other.start()
other.join()
more.untyped_storage().resize_(14 * MIB)
assert more.eq(50).all() and old.eq(1).all()
child = os.fork()
if child == 0:
    fine = more.eq(50).all() and block(2, 7).eq(7).all() and held[0].eq(1).all()
    held = None
    os._exit(0 if fine else 1)
assert os.waitpid(child, 0)[1] == 0
with torch.autograd.profiler.profile(profile_memory=True) as profiler:
    block(2, 3)
events = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
assert sum(events) == 0 and 2 * MIB in events, events
stored = module.new_storage(2 * MIB)
assert stored.nbytes() == 2 * MIB and module.figures()["live_bytes"] == 28 * MIB
assert stored.resize_(3 * MIB).nbytes() == 3 * MIB and module.new_storage(0).nbytes() == 0
del stored
odd = [torch.full((MIB + 16384,), 60 + i, dtype=torch.uint8) for i in range(4)]  # 64 KiB pages: no block shares one
del odd[::2]
assert block(4, 1).eq(1).all() and odd[0].eq(61).all() and odd[1].eq(63).all()
del odd
del outside, old
module.start()
module.stop()
assert module.figures()["kept_bytes"] > 0
module.stop()
figures = module.figures()
assert figures["kept_bytes"] == 0 and figures["live_bytes"] == 26 * MIB, figures
assert more.eq(50).all() and all(held[i].eq(2 * i + 1).all() for i in range(4))
del more, held
figures = module.figures()
assert figures["live_bytes"] == figures["kept_bytes"] == figures["num_segments"] == 0, figures
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("caching.cpp"), name="torchdelta_caching", self_test=_SELF_TEST
)


_below: list[Any] = []  # a capsule with the allocator below, once this one is installed


class CachingAllocator(Protocol):
    """The allocator of this process, see caching.cpp."""

    def start(self) -> None:
        """Allocate large blocks here until `stop` was called as often as `start`."""

    def release(self) -> int:
        """Unmap what no block uses. Return its bytes."""
        ...

    def new_storage(self, size_bytes: int, /) -> torch.UntypedStorage:
        """Return a storage from the current CPU allocator."""
        ...

    def stop(self) -> None:
        """Unmap what no block uses, once nobody uses this allocator. Live blocks stay until they are freed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachingFigures:
    """What the allocator holds, and what it has done.

    Attributes:
        live_bytes: Of blocks in use.
        kept_bytes: Of freed blocks whose pages wait to be used again.
        peak_bytes: The most of both together since the first budget that runs now began.
        fresh_bytes: Mapped anew since the process began.
        moved_bytes: Moved since the process began, to put a block together.
        num_segments: Ranges of addresses that all of it consists of, each within one mapping.
    """

    live_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    fresh_bytes: int = 0
    moved_bytes: int = 0
    num_segments: int = 0


def caching_allocator() -> CachingAllocator | NativeError:
    """Return the allocator; build and install it first if needed, below the counting allocator, which must be there.

    If that fails, return (not raise) a NativeError: the caller allocates without it.
    """
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE disables it")
    if installed_module() is None:
        return NativeError("the counting allocator is not installed")
    return _module()


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage on a device; on CPU from the current allocator, which `torch.UntypedStorage` would pass by."""
    if device.type == "cpu":
        module = _installed()
        if module is not None:
            return module.new_storage(size_bytes)
    return torch.UntypedStorage(size_bytes, device=device)


def release_kept() -> int:
    """Return to the system what no block uses, for a library that has run out of memory. Return its bytes."""
    module = _installed()
    return 0 if module is None else module.release()


def caching_figures() -> CachingFigures:
    """Return what the allocator holds; nothing before the first budget. Builds nothing."""
    module = _installed()
    return CachingFigures() if module is None else CachingFigures(**module.figures())


def caching_status() -> NativeStatus:
    """Return whether budgets of this process use it. Builds nothing."""
    if is_switched_off() or not _module.cache_info().currsize:
        return status_before_use(MODULE, "at the first budget on CPU")
    counting = installed_module()
    return status_in_use(_module(), lambda _: counting is not None and counting.is_installed())


def allocator_below() -> Any:
    """Return a capsule with the allocator to which this one forwards; None before it is installed."""
    return _below[0] if _below else None


def _installed() -> Any:
    """Return the module if this process has installed it, else None."""
    module = _module() if _module.cache_info().currsize else None
    return None if isinstance(module, NativeError) else module


@functools.cache
def _module() -> Any:
    """Return the installed module, or the NativeError that explains why there is none."""
    counting = installed_module()
    try:
        module = load(MODULE)
        below = counting.previous()
        counting.set_previous(module.install_before(below))
        _below.append(below)
    except NativeError as error:
        return error
    except RuntimeError as error:
        return NativeError(str(error))
    return module
